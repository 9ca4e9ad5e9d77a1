// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

namespace hotbed {

// A use, in the child of a fork, of what needs the threads or the disk of the process that it was forked from.
struct ForkedChild : std::logic_error {
  using std::logic_error::logic_error;
};

}  // namespace hotbed
