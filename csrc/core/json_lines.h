// SPDX-License-Identifier: Apache-2.0
// Lines of JSON: which of them are nested too deeply.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace hotbed {

/// Numbers of the lines of `text`, from 0, in which more than `levels` brackets are open at once outside of texts.
std::vector<std::size_t> deep_lines(std::string_view text, std::size_t levels);

}  // namespace hotbed
