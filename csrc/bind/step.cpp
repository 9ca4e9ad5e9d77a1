// SPDX-License-Identifier: Apache-2.0
// Tensors cross as addresses: the callers (embedding/table.py, embedding/lookups/local.py) have checked dtype, layout
// and length.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "arrays.h"
#include "core/exchange.h"
#include "core/map_queue.h"
#include "features.h"
#include "names.h"
#include "statistics.h"

using namespace hotbed;

namespace {

void map(Step& step, const std::vector<IdsTuple>& ids, Address times, bool training) {
  const std::vector<FeatureIds> features = checked_features(ids);
  nb::gil_scoped_release release;
  step.map(features, pointer<const int64_t>(times), training);
}

std::shared_ptr<MapTask> map_later(Step& step, MapQueue& queue, const std::vector<IdsTuple>& ids, Address times,
                                   const nb::object&, bool training) {
  return queue.add(step, checked_features(ids), pointer<const int64_t>(times), training);
}

nb::list statistics(MapTask& task) {
  {
    nb::gil_scoped_release release;
    task.wait();
  }
  nb::list out;
  for (const TableStats& table : task.statistics()) out.append(statistics_of(table));
  return out;
}

using FeatureTuples = std::vector<std::tuple<int, std::string_view>>;  // (table, pooling)

std::vector<Feature> features_of(const FeatureTuples& features) {
  std::vector<Feature> parsed;
  for (const auto& [table, pooling] : features) parsed.push_back({table, value_of(kPoolings, "pooling", pooling)});
  return parsed;
}

// Of a Step, a Question or an Answer, below.
template <class T>
nb::list list_of(std::vector<std::unique_ptr<T>> all) {
  nb::list out;
  for (std::unique_ptr<T>& one : all) out.append(nb::cast(std::move(one)));
  return out;
}

template <class T>
std::vector<int64_t> num_uniques(const T& step) {
  std::vector<int64_t> all;
  for (int t = 0; t < step.num_tables(); t++) all.push_back(step.num_unique(t));
  return all;
}

template <class T>
nb::list divide(T& step) {
  std::vector<std::unique_ptr<Step>> grains;
  {
    nb::gil_scoped_release release;
    grains = step.divide();
  }
  return list_of(std::move(grains));
}

template <class T>
nb::list split(T& step, const std::vector<size_t>& num_tables) {
  size_t sum = 0;
  for (const size_t count : num_tables) sum += count;
  if (sum != static_cast<size_t>(step.num_tables()))
    throw std::invalid_argument("step: to split it, each table must be taken once, got " + std::to_string(sum) +
                                " of " + std::to_string(step.num_tables()) + ".");
  return list_of(step.split(num_tables));
}

void pool(Step& step, const std::vector<RowsTuple>& out) {
  const std::vector<OutputRows> rows = output_rows(out);
  nb::gil_scoped_release release;
  step.pool(rows);
}

void set_weights(Step& step, const std::vector<Address>& weights) {
  std::vector<const float*> arrays;
  for (const Address of_feature : weights) arrays.push_back(pointer<const float>(of_feature));
  step.set_weights(arrays);
}

void lookup(Step& step, const std::vector<IdsTuple>& ids, Address times, const std::vector<RowsTuple>& out,
            bool training, bool keeps) {
  const std::vector<FeatureIds> features = checked_features(ids);
  const std::vector<OutputRows> rows = output_rows(out);
  nb::gil_scoped_release release;
  step.lookup(features, pointer<const int64_t>(times), training, keeps, rows);
}

void find(Question& question, const std::vector<IdsTuple>& ids, Address times) {
  const std::vector<FeatureIds> features = checked_features(ids);
  nb::gil_scoped_release release;
  question.find(features, pointer<const int64_t>(times));
}

Owners owners_of(const Input<uint8_t>& owners, const Question& question) {
  Owners out(static_cast<size_t>(question.num_tables()));
  if (owners.size() != out.size() * kPartitions)
    throw std::invalid_argument("step: owners must be [" + std::to_string(out.size()) + ", 256], got " +
                                std::to_string(owners.size()) + " of them. Give one a partition of each table.");
  for (size_t t = 0; t < out.size(); t++) std::copy_n(owners.data() + t * kPartitions, kPartitions, out[t].begin());
  return out;
}

using AskedTuple = std::tuple<std::vector<int64_t>, Address>;  // (ids of each table, words)

std::vector<Asked> asked_of(const Answer& answer, const std::vector<AskedTuple>& grains) {
  std::vector<Asked> asked;
  for (const auto& [counts, words] : grains) {
    if (counts.size() != static_cast<size_t>(answer.num_tables()))
      throw std::invalid_argument("step: a grain must have one count a table, got " + std::to_string(counts.size()) +
                                  " of " + std::to_string(answer.num_tables()) + ".");
    asked.push_back({counts, pointer<const int64_t>(words)});
  }
  return asked;
}

void map_asked(Answer& answer, const std::vector<AskedTuple>& grains, bool timed, bool training,
               const std::vector<uint64_t>& num_rows, bool logs) {
  const std::vector<Asked> asked = asked_of(answer, grains);
  nb::gil_scoped_release release;
  answer.map(asked, timed, training, num_rows, logs);
}

std::vector<uint64_t> count_rows(Answer& answer, const std::vector<AskedTuple>& grains, bool timed) {
  const std::vector<Asked> asked = asked_of(answer, grains);
  nb::gil_scoped_release release;
  return answer.count_rows(asked, timed);
}

void write_rows(Answer& answer, const std::vector<std::vector<Address>>& out) {
  std::vector<std::vector<float*>> rows;
  for (const std::vector<Address>& of_grain : out) {
    rows.emplace_back();
    for (const Address address : of_grain) rows.back().push_back(pointer<float>(address));
  }
  nb::gil_scoped_release release;
  answer.write_rows(rows);
}

using Addresses = std::vector<std::optional<Address>>;                 // of each table's sums; None = it is left alone
using GroupTuple = std::tuple<Address, int64_t, std::vector<size_t>>;  // (first sum, dim, tables one after another)

std::vector<float*> outputs(const Addresses& addresses) {
  std::vector<float*> out;
  for (const std::optional<Address> address : addresses) out.push_back(pointer<float>(address.value()));
  return out;
}

bool sum_gradients(Step& step, const std::vector<RowsTuple>& grads, const Addresses& sums) {
  std::vector<GradientRows> rows;
  for (const auto& [data, distance] : grads) rows.push_back({pointer<const float>(data), distance});
  const std::vector<float*> out = outputs(sums);
  nb::gil_scoped_release release;
  return step.sum_gradients(rows, out);
}

template <class T>
Addresses sum_addresses(const T& step, const std::vector<GroupTuple>& groups) {
  Addresses out(static_cast<size_t>(step.num_tables()));
  for (auto [address, dim, tables] : groups)
    for (const size_t t : tables) {
      out.at(t) = address;
      address += static_cast<Address>(step.num_unique(static_cast<int>(t)) * dim) * sizeof(float);
    }
  return out;
}

Sums sums_of(const Addresses& addresses) {
  Sums out(addresses.size());
  for (size_t t = 0; t < addresses.size(); t++)
    if (addresses[t]) out[t] = pointer<const float>(*addresses[t]);
  return out;
}

nb::tuple merge_steps(const std::vector<Step*>& steps, const std::vector<Addresses>& sums) {
  std::vector<Sums> addresses;
  for (const Addresses& one : sums) addresses.push_back(sums_of(one));
  std::vector<std::vector<float>> merged_sums;
  std::unique_ptr<Step> merged;
  {
    nb::gil_scoped_release release;
    merged = Step::merge(steps, addresses, &merged_sums);
  }
  nb::list arrays;
  for (std::vector<float>& sum : merged_sums) arrays.append(to_numpy(std::move(sum)));
  return nb::make_tuple(std::move(merged), arrays);
}

using GrainTuple = std::tuple<std::vector<int64_t>, Addresses>;  // (distinct ids of each table, their sums)

std::vector<GrainSums> grain_sums(const std::vector<GrainTuple>& grains) {
  std::vector<GrainSums> out;
  for (const auto& [num_ids, addresses] : grains) out.push_back({num_ids, sums_of(addresses)});
  return out;
}

template <class T>
bool join(const T& step, const std::vector<GrainTuple>& grains, const Addresses& out) {
  const std::vector<GrainSums> sums = grain_sums(grains);
  const std::vector<float*> joined = outputs(out);
  nb::gil_scoped_release release;
  return step.join(sums, joined);
}

template <class T>
std::unique_ptr<Step> summed(T& step, const Addresses& sums) {
  const std::vector<float*> joined = outputs(sums);
  nb::gil_scoped_release release;
  return step.summed(joined);
}

void write_sums(const Question& question, const std::vector<GrainTuple>& grains, Address out) {
  const std::vector<GrainSums> sums = grain_sums(grains);
  nb::gil_scoped_release release;
  question.write_sums(sums, pointer<float>(out));
}

void apply(Step& step, const Addresses& sums, const std::vector<double>& rates) {
  nb::gil_scoped_release release;
  step.apply(sums_of(sums), rates);
}

std::optional<int64_t> find_nonfinite(const Step& step, int table, Address sums) {
  int64_t id;
  if (!step.find_nonfinite(table, pointer<const float>(sums), &id)) return std::nullopt;
  return id;
}

}  // namespace

void init_step(nb::module_& m) {
  nb::class_<MapTask>(m, "MapTask")
      .def("wait", &MapTask::wait, nb::call_guard<nb::gil_scoped_release>())
      .def("take_back", &MapTask::take_back, nb::call_guard<nb::gil_scoped_release>())
      .def("statistics", &statistics);
  nb::class_<MapQueue>(m, "MapQueue")
      .def(nb::init<>())
      .def("hold", &MapQueue::hold)
      .def("close", &MapQueue::close, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<Step>(m, "Step")
      .def(
          "__init__",
          [](Step* self, const std::vector<std::shared_ptr<Table>>& tables, const FeatureTuples& features,
             const std::vector<int64_t>& grain_ends) { new (self) Step(tables, features_of(features), grain_ends); },
          nb::arg("tables"), nb::arg("features"), nb::arg("grain_ends") = std::vector<int64_t>())
      .def_static(
          "of_slots",
          [](const std::shared_ptr<Table>& table, const Input<int64_t>& slots) {
            return std::unique_ptr<Step>(
                new Step(Step::of_slots(table, slots.data(), static_cast<int64_t>(slots.size()))));
          },
          nb::arg("table"), nb::arg("slots"))
      .def(
          "mark", [](Step& s, Address counted) { s.mark(pointer<const uint8_t>(counted)); }, nb::arg("counted"))
      .def("map", &map, nb::arg("ids"), nb::arg("times"), nb::kw_only(), nb::arg("training"))
      .def("map_later", &map_later, nb::arg("queue"), nb::arg("ids"), nb::arg("times"), nb::arg("owner"), nb::kw_only(),
           nb::arg("training"), nb::keep_alive<1, 5>())
      .def("take_back", &Step::take_back, nb::call_guard<nb::gil_scoped_release>())
      .def("divide", &divide<Step>, nb::sig("def divide(self) -> list[Step]"))
      .def("split", &split<Step>, nb::arg("num_tables"),
           nb::sig("def split(self, num_tables: Sequence[int]) -> list[Step]"))
      .def("set_weights", &set_weights, nb::arg("weights"))
      .def("pool", &pool, nb::arg("out"))
      .def("lookup", &lookup, nb::arg("ids"), nb::arg("times"), nb::arg("out"), nb::kw_only(), nb::arg("training"),
           nb::arg("keeps"))
      .def(
          "position_rows",
          [](Step& s, int feature, Address rows) {
            nb::gil_scoped_release release;
            s.position_rows(feature, pointer<float>(rows));
          },
          nb::arg("feature"), nb::arg("rows"))
      .def(
          "unique_rows",
          [](Step& s, int t, Address rows, Address slots) {
            nb::gil_scoped_release release;
            s.unique_rows(t, pointer<float>(rows), pointer<int64_t>(slots));
          },
          nb::arg("table"), nb::arg("rows"), nb::arg("slots"))
      .def("let_go", &Step::let_go)
      .def("num_uniques", &num_uniques<Step>)
      .def("tables", &Step::tables)
      .def(
          "unique_ids", [](const Step& s, int t) { return to_numpy(s.unique_ids(t)); }, nb::arg("table"))
      .def(
          "position_slots", [](const Step& s, int t, Address out) { s.position_slots(t, pointer<int64_t>(out)); },
          nb::arg("table"), nb::arg("out"))
      .def("sum_addresses", &sum_addresses<Step>, nb::arg("groups"))
      .def("sum_gradients", &sum_gradients, nb::arg("grads"), nb::arg("sums"))
      .def("join", &join<Step>, nb::arg("grains"), nb::arg("out"))
      .def("summed", &summed<Step>, nb::arg("sums"))
      .def_static("merge", &merge_steps, nb::arg("steps"), nb::arg("sums"))
      .def(
          "leave_out",
          [](Step& s, int t, const Input<int64_t>& numbers) {
            s.leave_out(t, numbers.data(), static_cast<int64_t>(numbers.size()));
          },
          nb::arg("table"), nb::arg("numbers"))
      .def(
          "add_squares",
          [](const Step& s, int t, Address sums, Address squares) {
            s.add_squares(t, pointer<const float>(sums), pointer<double>(squares));
          },
          nb::arg("table"), nb::arg("sums"), nb::arg("squares"))
      .def("find_nonfinite", &find_nonfinite, nb::arg("table"), nb::arg("sums"))
      .def("apply", &apply, nb::arg("sums"), nb::arg("rates"));
  nb::class_<Question>(m, "Question")
      .def(
          "__init__",
          [](Question* self, const std::vector<std::shared_ptr<Table>>& tables, const FeatureTuples& features,
             const std::vector<int64_t>& grain_ends) {
            new (self) Question(tables, features_of(features), grain_ends);
          },
          nb::arg("tables"), nb::arg("features"), nb::arg("grain_ends"))
      .def(
          "mark", [](Question& q, Address counted) { q.mark(pointer<const uint8_t>(counted)); }, nb::arg("counted"))
      .def("find", &find, nb::arg("ids"), nb::arg("times"))
      .def(
          "ask",
          [](Question& q, const Input<uint8_t>& owners, int num_owners) {
            return q.ask(owners_of(owners, q), num_owners);
          },
          nb::arg("owners"), nb::arg("num_owners"))
      .def("num_words", &Question::num_words, nb::arg("counts"), nb::arg("timed"))
      .def(
          "write_asked", [](const Question& q, Address words) { q.write_asked(pointer<int64_t>(words)); },
          nb::arg("words"))
      .def(
          "take_rows", [](Question& q, Address rows) { q.take_rows(pointer<const float>(rows)); }, nb::arg("rows"))
      .def("divide", &divide<Question>, nb::sig("def divide(self) -> list[Step]"))
      .def("write_sums", &write_sums, nb::arg("grains"), nb::arg("out"));
  nb::class_<Answer>(m, "Answer")
      .def(nb::init<std::vector<std::shared_ptr<Table>>>(), nb::arg("tables"))
      .def("mark", &Answer::mark)
      .def("count_rows", &count_rows, nb::arg("grains"), nb::kw_only(), nb::arg("timed"))
      .def("map", &map_asked, nb::arg("grains"), nb::kw_only(), nb::arg("timed"), nb::arg("training"),
           nb::arg("num_rows"), nb::arg("logs"))
      .def("take_back", &Answer::take_back, nb::call_guard<nb::gil_scoped_release>())
      .def("write_rows", &write_rows, nb::arg("out"))
      .def("let_go", &Answer::let_go)
      .def("split", &split<Answer>, nb::arg("num_tables"),
           nb::sig("def split(self, num_tables: Sequence[int]) -> list[Answer]"))
      .def("num_uniques", &num_uniques<Answer>)
      .def("sum_addresses", &sum_addresses<Answer>, nb::arg("groups"))
      .def("join", &join<Answer>, nb::arg("grains"), nb::arg("out"))
      .def("summed", &summed<Answer>, nb::arg("sums"));
  m.def(
      "read_ahead",
      [](const std::vector<std::shared_ptr<Table>>& tables, const FeatureTuples& features,
         const std::vector<IdsTuple>& ids) {
        const std::vector<FeatureIds> parsed = checked_features(ids);
        nb::gil_scoped_release release;
        read_ahead(tables, features_of(features), parsed);
      },
      nb::arg("tables"), nb::arg("features"), nb::arg("ids"));
}
