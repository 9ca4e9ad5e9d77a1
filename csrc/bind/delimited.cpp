// SPDX-License-Identifier: Apache-2.0
// Python face of the scanners of delimited text and of JSON lines.
#include "core/delimited.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "core/json_lines.h"

namespace nb = nanobind;

namespace {

nb::tuple scan_rows(const nb::bytes& text, std::size_t begin, nb::tuple format, bool is_last) {
  const std::string_view bytes(text.c_str(), text.size());
  const hotbed::RowFormat row_format{nb::cast<int>(format[0]), static_cast<char>(nb::cast<int>(format[1])),
                                     nb::cast<std::size_t>(format[2])};
  hotbed::RowScan scan;
  {
    nb::gil_scoped_release released;
    scan = hotbed::scan_rows(bytes, begin, row_format, is_last);
  }
  nb::object bad = nb::none();
  if (scan.bad) bad = nb::make_tuple(scan.bad->begin, scan.bad->line, scan.bad->at, scan.bad->is_long);
  return nb::make_tuple(scan.end, scan.rows, scan.lines, nb::cast(scan.jumps), nb::cast(scan.excess), bad);
}

std::vector<std::size_t> deep_lines(const nb::bytes& text, std::size_t levels) {
  const std::string_view bytes(text.c_str(), text.size());
  nb::gil_scoped_release released;
  return hotbed::deep_lines(bytes, levels);
}

}  // namespace

void init_delimited(nb::module_& m) {
  m.def("deep_lines", &deep_lines, nb::arg("text"), nb::arg("levels"),
        "Numbers of the lines of JSON that are nested deeper than `levels`, from 0.");
  m.def("scan_rows", &scan_rows, nb::arg("text"), nb::arg("begin"), nb::arg("format"), nb::arg("is_last"),
        "Rows of delimited text from an offset on; `format` is (quote or -1, delimiter, most bytes of a row). Returns "
        "the offset after the last whole row, rows and line ends before it, rows before which more line ends than "
        "rows were passed, how many more, and a bad row or None: (its begin, line ends before the bad line, an offset "
        "in that line, whether it is too long).");
}
