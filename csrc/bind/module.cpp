// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "core/forks.h"
#include "core/kernels.h"
#include "core/store.h"
#include "core/table.h"
#include "core/thread_pool.h"

namespace nb = nanobind;

void init_attention(nb::module_& m);
void init_delimited(nb::module_& m);
void init_disk(nb::module_& m);
void init_encode(nb::module_& m);
void init_frozen(nb::module_& m);
void init_histories(nb::module_& m);
void init_norm(nb::module_& m);
void init_requests(nb::module_& m);
void init_row_cache(nb::module_& m);
void init_step(nb::module_& m);
void init_table(nb::module_& m);

namespace {

void raise_as(const char* name, const char* message) {
  nb::object type = nb::module_::import_("hotbed.errors").attr(name);
  PyErr_SetString(type.ptr(), message);
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a process that ends with an exception still holds tables: nothing to tell users
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const hotbed::TableFull& full) {
      raise_as("TableFull", full.what());
    } catch (const hotbed::StorageFull& full) {
      raise_as("StorageFull", full.what());
    } catch (const hotbed::StorageFailed& failed) {
      raise_as("StorageFailed", failed.what());
    } catch (const hotbed::RecordLost& lost) {
      raise_as("RecordLost", lost.what());
    } catch (const hotbed::ForkedChild& child) { raise_as("TableError", child.what()); }
  });
  m.def("set_num_threads", &hotbed::ThreadPool::set_num_threads, nb::arg("num_threads"));
  m.def("num_threads", &hotbed::ThreadPool::num_threads);
  m.def("isa_name", &hotbed::isa_name);
  m.def("set_isa", [](const std::string& name) { return hotbed::set_isa(name.c_str()); }, nb::arg("name"));
  init_attention(m);
  init_delimited(m);
  init_disk(m);
  init_encode(m);
  init_table(m);
  init_step(m);
  init_frozen(m);
  init_histories(m);
  init_norm(m);
  init_requests(m);
  init_row_cache(m);
}
