# SPDX-License-Identifier: Apache-2.0
"""ModelFiles: which of HugeCTR's files hold which parts of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hotbed.compat.hugectr.clauses import (
    EmbeddingCollectionConfig,
    EmbeddingTrainingCacheParams,
    Graph,
    ParamFiles,
    Solver,
    SparseEmbedding,
)
from hotbed.compat.hugectr.model.console import say
from hotbed.compat.hugectr.paths import check_local
from hotbed.compat.hugectr.translate import EmbeddingOf, Translation
from hotbed.compat.hugectr.weights import (
    GatheredRows,
    Rows,
    SlotsOfKeys,
    SparseFile,
    load_collection,
    load_dense,
    load_dense_states,
    load_sparse,
    load_sparse_states,
    save_collection,
    save_dense,
    save_dense_states,
    save_sparse,
    save_sparse_states,
)
from hotbed.config import did_you_mean
from hotbed.embedding.table import Table
from hotbed.errors import ConfigError
from hotbed.files import writing
from hotbed.parallel import Shard
from hotbed.training.model import RecModel


class ModelFiles:
    """Saves and loads the parts of a compiled model, by HugeCTR's names of files.

    Args:
        learner: has network and optimizers.
        translation: says how parts are stored.
        graph: of the model.
        solver: decides the width of keys; one of v2.3 to v3.0.1 saves a table as one file.
        etc_params: its sparse models are loaded where they exist, and saved to.

    Attributes:
        seen: the slots of keys by the name of the embedding, of localized ones whose slots share
            keys.
    """

    def __init__(
        self,
        learner: RecModel,
        translation: Translation,
        graph: Graph,
        solver: Solver,
        etc_params: EmbeddingTrainingCacheParams | None,
    ) -> None:
        self._learner = learner
        self._translation = translation
        self._graph = graph
        self._solver = solver
        self._sparse_models = () if etc_params is None else etc_params.sparse_models
        self._loaded: dict[str, str] = {}  # the file that each embedding was loaded from
        self._embeddings: dict[str, EmbeddingOf] = {}
        self._collected: dict[str, Table] = {}  # the tables of embedding collections
        for embedding in translation.embeddings:
            if isinstance(embedding.clause, SparseEmbedding):
                self._embeddings[embedding.clause.sparse_embedding_name] = embedding
            else:
                self._collected[embedding.clause.name] = translation.tables[embedding.table]
        self.seen: dict[str, SlotsOfKeys] = {}
        for name, embedding in self._embeddings.items():
            if _is_localized(embedding) and not any(embedding.offsets):
                self.seen[name] = SlotsOfKeys(embedding.slots)

    def load_first(self, files: ParamFiles | None) -> None:
        """Load what a solver or an embedding training cache starts from."""
        for name, path in zip(self._embeddings, self._sparse_models, strict=False):
            if (Path(path) / "key").exists():
                say(f"Use existing embedding: {path}")
                self.load_sparse({name: path})
            else:
                say(f"Empty embedding, trained table will be stored in {path}")
        if files is None:
            return
        if files.dense_model_file:
            self.load_dense(files.dense_model_file)
        if files.dense_opt_states_file:
            self.load_dense_states(files.dense_opt_states_file)
        if files.sparse_model_files:
            self.load_sparse(files.sparse_model_files)
        if files.sparse_opt_states_files:
            self.load_sparse_states(files.sparse_opt_states_files)

    def save(self, prefix: str, iteration: int) -> None:
        """Save dense parameters, tables and their states; of several ranks, the first does.

        Raises:
            ConfigError: the prefix is an address of a remote file system.
            NotWritten: a file cannot be written.
        """
        check_local("save_params_to_files.prefix", prefix)
        with writing(prefix), self._whole(prefix) as tables:
            for slots in self.seen.values():
                slots.gather(self._shard)
            self._shard.from_first(lambda: self._save(prefix, iteration, tables))

    def _save(self, prefix: str, iteration: int, tables: Mapping[str, Rows]) -> None:
        rates = self._learner.table_learning_rates
        for number, (name, embedding) in enumerate(self._embeddings.items()):
            table = tables[embedding.table]
            path = f"{prefix}{number}_sparse_{iteration}.model"
            if number < len(self._sparse_models):
                path = self._sparse_models[number]
            save_sparse(path, table, self._format(name))
            save_sparse_states(
                f"{prefix}{number}_opt_sparse_{iteration}.model",
                table,
                self._format(name),
                rates.get(embedding.table),  # None if no loss needs it
            )
        say("Dumping sparse weights to files, successful")
        network = self._learner.network
        save_dense(f"{prefix}_dense_{iteration}.model", network, self._translation)
        save_dense_states(
            f"{prefix}_opt_dense_{iteration}.model",
            self._learner.learner.dense,
            network,
            self._translation,
        )
        say("Dumping dense weights to file, successful")

    def load_dense(self, path: str) -> None:
        """Load the dense parameters, and the statistics of batches beside them."""
        say(f"Loading dense model: {path}")
        with self._shard.together():
            load_dense(path, self._learner.network, self._translation)

    def load_dense_states(self, path: str) -> None:
        """Load the optimizer state of the dense parameters."""
        say(f"Loading dense opt states: {path}")
        with self._shard.together():
            load_dense_states(
                path, self._learner.learner.dense, self._learner.network, self._translation
            )

    def load_sparse(self, paths: Sequence[str] | Mapping[str, str]) -> None:
        """Load the rows of all embeddings in their order, or of some by their names."""
        for name, path in self._by_name("sparse_embedding_files", paths):
            say(f"Loading sparse model: {path}")
            with self._shard.together():
                load_sparse(path, self.table_of(name), self._format(name))
            self._loaded[name] = path

    def load_sparse_states(self, paths: Sequence[str] | Mapping[str, str]) -> None:
        """Load the optimizer states of rows, in the order of the rows that were loaded."""
        for name, path in self._by_name("sparse_opt_states_files", paths):
            if name not in self._loaded:
                raise ConfigError(
                    f"load_sparse_optimizer_states: the rows of {name!r} are not loaded, got "
                    f"{path!r}. Load the sparse weights first: they hold the keys."
                )
            say(f"Loading sparse optimizer states: {path}")
            table = self.table_of(name)
            with self._shard.together():
                load_sparse_states(
                    path,
                    self._loaded[name],
                    table,
                    self._format(name),
                    self._learner.table_learning_rates.get(table.name),
                )

    def save_collections(self, path: str, names: Sequence[str]) -> None:
        """Save tables of embedding collections; without names, all."""
        check_local("embedding_dump.path", path)
        with writing(path), self._whole(path) as whole:
            self._shard.from_first(lambda: self._save_collections(path, names, whole))

    def _save_collections(self, path: str, names: Sequence[str], whole: Mapping[str, Rows]) -> None:
        for number, tables in self._collections(names):
            rows = {place: whole[table.name] for place, table in tables.items()}
            save_collection(path, rows, number, i64=self._solver.i64_input_key)

    def load_collections(self, path: str, names: Sequence[str]) -> None:
        """Load tables of embedding collections; without names, all."""
        for number, tables in self._collections(names):
            with self._shard.together():
                load_collection(path, tables, number)

    def table_of(self, name: str) -> Table:
        """Return the table of a `SparseEmbedding`."""
        if name not in self._embeddings:
            raise ConfigError(
                f"embedding: the model has no such embedding, got {name!r}. "
                f"{did_you_mean(name, self._embeddings)}"
            )
        return self._translation.tables[self._embeddings[name].table]

    @property
    def short_keys(self) -> bool:
        """Whether files of rows hold keys of 32 bits; a folder of v3.1 and later has 64."""
        is_folder = self._solver.fit is None and not self._collected
        return not self._solver.i64_input_key and not is_folder

    @property
    def _shard(self) -> Shard:
        return self._learner.learner.shard

    @contextmanager
    def _whole(self, path: str) -> Iterator[Mapping[str, Rows]]:
        """Yield all rows of all tables; of several ranks, to the first one.

        Its rows of other ranks lie in a folder beside `path` meanwhile.
        """
        if self._shard.size == 1:
            yield self._translation.tables
            return
        with ExitStack() as opened:

            def make() -> str:
                parent = Path(path).absolute().parent
                parent.mkdir(parents=True, exist_ok=True)
                return opened.enter_context(TemporaryDirectory(prefix=".rows-", dir=parent))

            folder = Path(self._shard.from_first(make))
            yield {
                name: GatheredRows(table, self._shard, folder / f"{number}.arrow")
                for number, (name, table) in enumerate(self._translation.tables.items())
            }

    @property
    def tables(self) -> dict[str, Table]:
        """The tables of all `SparseEmbedding`, by its name."""
        return {name: self.table_of(name) for name in self._embeddings}

    def _by_name(
        self, argument: str, paths: Sequence[str] | Mapping[str, str]
    ) -> list[tuple[str, str]]:
        """Return name and path of each embedding."""
        if isinstance(paths, Mapping):
            return list(paths.items())
        if isinstance(paths, str):
            raise ConfigError(
                f"{argument}: expected a list of files, got {paths!r}. Write [{paths!r}]."
            )
        if len(paths) != len(self._embeddings):
            raise ConfigError(
                f"{argument}: one file for each embedding is needed, got {list(paths)} for "
                f"{list(self._embeddings)}. Give as many, or a mapping by name."
            )
        return list(zip(self._embeddings, paths, strict=True))

    def _format(self, name: str) -> SparseFile:
        embedding = self._embeddings[name]
        return SparseFile(
            form="folder" if self._solver.fit is None else "file",
            localized=_is_localized(embedding),
            i64=self._solver.i64_input_key,
            offsets=embedding.offsets,
            seen=self.seen.get(name),
            keys=embedding.keys,
            keeps_times=embedding.keeps_times,
        )

    def _collections(self, names: Sequence[str]) -> Iterator[tuple[int, dict[int, Table]]]:
        """Yield each embedding collection: its number, and its tables by theirs."""
        configs = []
        for embedding in self._graph.embeddings:
            if isinstance(embedding, EmbeddingCollectionConfig):
                configs.append(dict.fromkeys(lookup.table.name for lookup in embedding.lookups))
        all_names = [name for config in configs for name in config]
        for name in names:
            if name not in all_names:
                raise ConfigError(
                    f"table_names: no embedding collection has this table, got {name!r}. "
                    f"{did_you_mean(name, all_names)}"
                )
        for number, config in enumerate(configs):
            tables = {}
            for place, name in enumerate(config):
                if not names or name in names:
                    tables[place] = self._collected[name]
            if tables:
                yield number, tables


def _is_localized(embedding: EmbeddingOf) -> bool:
    """Return whether the rows of an embedding have slots in files."""
    assert isinstance(embedding.clause, SparseEmbedding)
    return embedding.clause.embedding_type.name.startswith("Localized")
