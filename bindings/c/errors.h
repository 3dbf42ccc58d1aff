#pragma once
// Errors of C++ as codes of C.

#include <string>

#include "snug/c.h"
#include "snug/core.h"

namespace snug::c {

/// In a handler. Keeps the text, and the budget, for snug_last_error() and snug_last_smallest_budget() of this thread.
snug_status failed_by_exception() noexcept;

/// Calls `body`. What it throws becomes a status.
template <class F>
snug_status guarded(F&& body) noexcept {
  try {
    body();
    return SNUG_OK;
  } catch (...) {
    return failed_by_exception();
  }
}

/// Throws ConfigError for a null pointer.
template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) {
    throw ConfigError(std::string(name) + " is null");
  }
  return *pointer;
}

}  // namespace snug::c
