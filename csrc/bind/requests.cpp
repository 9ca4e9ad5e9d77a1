// SPDX-License-Identifier: Apache-2.0
// Python face of the splitter of infer requests.
#include "core/requests.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

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
nb::tuple split_bytes(const nb::bytes& request, std::size_t inputs, std::size_t head_bytes, std::size_t slice) {
  const std::string_view bytes(request.c_str(), request.size());
  const hotbed::RequestLimits limits{inputs, head_bytes, slice};
  hotbed::SplitRequest result;
  if (bytes.size() > kInlineBytes) {
    nb::gil_scoped_release released;
    result = split(bytes, limits);
  } else {
    result = split(bytes, limits);
  }
  nb::object head = nb::none();
  if (result.head_fits) head = nb::bytes(result.head.data(), result.head.size());
  return nb::make_tuple(head, result.inputs, described(result.parts), described(result.raw));
}

}  // namespace

void init_requests(nb::module_& m) {
  m.def("split_json", &split_bytes<hotbed::split_json>, nb::arg("request"), nb::arg("inputs"), nb::arg("head_bytes"),
        nb::arg("slice"),
        "Head without the values of tensors (None where it is longer than head_bytes), number of inputs, and where "
        "the values lie: (input, begin, end, entries, cuts).");
  m.def("split_message", &split_bytes<hotbed::split_message>, nb::arg("request"), nb::arg("inputs"),
        nb::arg("head_bytes"), nb::arg("slice"),
        "As split_json, of a ModelInferRequest; and where its raw contents lie. Raises ValueError for other bytes.");
}
