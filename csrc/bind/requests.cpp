// SPDX-License-Identifier: Apache-2.0
// Python face of the splitter of infer requests.
#include "core/requests.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "arrays.h"

namespace nb = nanobind;

namespace {

constexpr std::size_t kInlineBytes = 64 << 10;  // shorter requests take less time than handing on the interpreter

nb::list described(const std::vector<hotbed::RequestPart>& parts) {
  nb::list list;
  for (const auto& part : parts) {
    list.append(nb::make_tuple(part.input, part.begin, part.end, part.entries, nb::cast(part.cuts)));
  }
  return list;
}

template <auto split>
hotbed::SplitRequest split_bytes(std::string_view request, const hotbed::RequestLimits& limits) {
  if (request.size() <= kInlineBytes) return split(request, limits);
  nb::gil_scoped_release released;
  return split(request, limits);
}

nb::object head_of(const hotbed::SplitRequest& request) {
  if (!request.head_fits) return nb::none();
  return nb::bytes(request.head.data(), request.head.size());
}

nb::tuple split_json(const nb::bytes& request, std::size_t inputs, std::size_t head_bytes, std::size_t slice) {
  const std::string_view bytes(request.c_str(), request.size());
  const auto result = split_bytes<hotbed::split_json>(bytes, {inputs, head_bytes, slice});
  return nb::make_tuple(head_of(result), result.inputs, described(result.parts));
}

std::optional<Output<std::int64_t>> json_integers(const nb::bytes& request, std::size_t begin, std::size_t end,
                                                  std::size_t size) {
  if (begin > end || end > request.size()) return std::nullopt;
  std::vector<std::int64_t> numbers;
  numbers.reserve(std::min(size, (end - begin) / 2));
  const bool are_integers = hotbed::read_integers({request.c_str() + begin, end - begin}, numbers);
  if (!are_integers || numbers.size() != size) return std::nullopt;
  return to_numpy(std::move(numbers));
}

nb::tuple split_message(const nb::bytes& request, std::size_t inputs, std::size_t head_bytes, std::size_t slice) {
  const std::string_view bytes(request.c_str(), request.size());
  const auto result = split_bytes<hotbed::split_message>(bytes, {inputs, head_bytes, slice});
  nb::list sizes;
  std::size_t total = 0;
  for (const auto& part : result.raw) {
    sizes.append(part.end - part.begin);
    total += part.end - part.begin;
  }
  const auto raw = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(total)));
  if (!raw.is_valid()) nb::raise_python_error();
  char* to = PyBytes_AsString(raw.ptr());
  for (const auto& part : result.raw) { to = std::copy(bytes.data() + part.begin, bytes.data() + part.end, to); }
  return nb::make_tuple(head_of(result), result.inputs, described(result.parts), sizes, raw);
}

}  // namespace

void init_requests(nb::module_& m) {
  m.def("split_json", &split_json, nb::arg("request"), nb::arg("inputs"), nb::arg("head_bytes"), nb::arg("slice"),
        "Head without the values of tensors (None where it is longer than head_bytes), number of inputs, and where "
        "the values lie: (input, begin, end, entries, cuts).");
  m.def("json_integers", &json_integers, nb::arg("request"), nb::arg("begin"), nb::arg("end"), nb::arg("size"),
        "int64 [size], of a flat list of as many whole numbers at [begin, end); None where that is something else.");
  m.def("split_message", &split_message, nb::arg("request"), nb::arg("inputs"), nb::arg("head_bytes"), nb::arg("slice"),
        "As split_json, of a ModelInferRequest; and its raw contents: their sizes, and their bytes one after the "
        "other. Raises ValueError for other bytes.");
}
