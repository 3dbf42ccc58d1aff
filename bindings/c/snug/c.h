#ifndef SNUG_C_H
#define SNUG_C_H
/* snug for other languages, in C99: models that Python saved by torch.export. No exception leaves a function.
 * Handles may be used by one thread at a time. Strings belong to their handle. */

#include <stddef.h>

#define SNUG_C_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with each release that adds or changes a function. */
#define SNUG_C_VERSION 1

typedef enum snug_status {
  SNUG_OK = 0,
  SNUG_ERROR = 1,
  SNUG_INVALID_ARGUMENT = 2,
  SNUG_CORRUPT_FILE = 3,
  SNUG_OUT_OF_MEMORY = 4
} snug_status;

typedef struct snug_model snug_model;

/* SNUG_C_VERSION of the library that is loaded. */
SNUG_C_API int snug_c_version(void);

/* The text of this thread's last error, until its next one; "" where there was none. It belongs to the thread, since a
 * function that fails to make a handle has no handle to keep it. */
SNUG_C_API const char* snug_last_error(void);

/* Reads a file as snug::load_exported does. *model is written where it succeeds alone; free it by snug_model_free. */
SNUG_C_API snug_status snug_model_load(const char* file, snug_model** model);
/* Null is allowed. */
SNUG_C_API void snug_model_free(snug_model* model);

/* 0 for a null model. */
SNUG_C_API size_t snug_model_input_count(const snug_model* model);
SNUG_C_API size_t snug_model_output_count(const snug_model* model);
/* Null for a null model and for an index that is too large. */
SNUG_C_API const char* snug_model_input_name(const snug_model* model, size_t index);
SNUG_C_API const char* snug_model_output_name(const snug_model* model, size_t index);

#ifdef __cplusplus
}
#endif
#endif
