#include "bindings/c/errors.h"

#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include <c10/util/Exception.h>

#include "snug/core.h"
#include "snug/exported/exported_module.h"
#include "snug/state.h"

namespace snug::c {
namespace {

struct LastError {
  std::string text;
  int64_t smallest_budget = 0;
};

LastError& last_error() {
  thread_local LastError error;
  return error;
}

bool is_of_memory(const std::exception& error) {
  return is_out_of_memory(error) || dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
}

snug_status status_of(const std::exception& error) {
  return is_of_memory(error)                                   ? SNUG_OUT_OF_MEMORY
         : dynamic_cast<const CorruptFile*>(&error) != nullptr ? SNUG_CORRUPT_FILE
         : dynamic_cast<const ConfigError*>(&error) != nullptr || dynamic_cast<const UnfitInput*>(&error) != nullptr
             ? SNUG_INVALID_ARGUMENT
             : SNUG_ERROR;
}

snug_status failed(snug_status status, const char* text, int64_t smallest_budget = 0) noexcept {
  last_error().smallest_budget = smallest_budget;
  try {
    last_error().text = text;
  } catch (...) {
    last_error().text.clear();
  }
  return status;
}

}  // namespace

snug_status failed_by_exception() noexcept {
  try {
    throw;
  } catch (const BudgetExceeded& error) {
    return failed(SNUG_BUDGET_EXCEEDED, error.what(), error.smallest_feasible().count());
  } catch (const c10::Error& error) {
    return failed(status_of(error), error.what_without_backtrace());
  } catch (const std::exception& error) {
    return failed(status_of(error), error.what());
  } catch (...) {
    return failed(SNUG_ERROR, "an exception of an unknown type");
  }
}

}  // namespace snug::c

int snug_c_version(void) { return SNUG_C_VERSION; }

const char* snug_last_error(void) { return snug::c::last_error().text.c_str(); }

int64_t snug_last_smallest_budget(void) { return snug::c::last_error().smallest_budget; }
