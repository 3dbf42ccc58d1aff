#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "snug/c.h"
#include "snug/core/error.h"
#include "snug/exported/exported_module.h"

struct snug_model {
  std::shared_ptr<snug::ExportedModule> module;
};

namespace {

thread_local std::string last_error;

snug_status failed(snug_status status, const char* text) noexcept {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

template <class F>
snug_status guarded(F&& body) noexcept {
  try {
    body();
    return SNUG_OK;
  } catch (const snug::CorruptFile& e) {
    return failed(SNUG_CORRUPT_FILE, e.what());
  } catch (const c10::OutOfMemoryError& e) {
    return failed(SNUG_OUT_OF_MEMORY, e.what_without_backtrace());
  } catch (const std::bad_alloc& e) {
    return failed(SNUG_OUT_OF_MEMORY, e.what());
  } catch (const std::exception& e) {
    return failed(SNUG_ERROR, e.what());
  } catch (...) {
    return failed(SNUG_ERROR, "an exception of an unknown type");
  }
}

const char* name_at(const std::vector<std::string>& names, size_t index) {
  return index < names.size() ? names[index].c_str() : nullptr;
}

}  // namespace

int snug_c_version(void) { return SNUG_C_VERSION; }

const char* snug_last_error(void) { return last_error.c_str(); }

snug_status snug_model_load(const char* file, snug_model** model) {
  if (file == nullptr || model == nullptr) {
    return failed(SNUG_INVALID_ARGUMENT, "snug_model_load: file or model is null");
  }
  return guarded([&] { *model = new snug_model{snug::load_exported(file)}; });
}

void snug_model_free(snug_model* model) { delete model; }

size_t snug_model_input_count(const snug_model* model) { return model ? model->module->input_names().size() : 0; }

size_t snug_model_output_count(const snug_model* model) { return model ? model->module->output_names().size() : 0; }

const char* snug_model_input_name(const snug_model* model, size_t index) {
  return model ? name_at(model->module->input_names(), index) : nullptr;
}

const char* snug_model_output_name(const snug_model* model, size_t index) {
  return model ? name_at(model->module->output_names(), index) : nullptr;
}
