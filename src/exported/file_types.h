#pragma once
// Types, devices and numbers in the notation of an exported file. The file's codes are the codes of
// torch/_export/serde/schema.py, and not c10's.

#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include "src/exported/union_json.h"

namespace snug::detail {

// All functions throw CorruptFile for content that the format does not have.
c10::ScalarType scalar_type_of(const ExportJson& code);
c10::MemoryFormat memory_format_of(const ExportJson& code);
c10::Device device_of(const ExportJson& json);
double float_of(const ExportJson& json);  // also "Infinity", "-Infinity", "NaN"

}  // namespace snug::detail
