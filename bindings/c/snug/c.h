#ifndef SNUG_C_H
#define SNUG_C_H
/* snug for other languages, in C99: models that Python saved by torch.export, trained within a number of bytes.
 *
 *   snug_model* model;
 *   snug_stepper* stepper;
 *   const char* settings[] = {"optimizer=adamw", "lr=1e-3", "memory=1GiB", NULL};
 *   if (snug_model_load("model.pt2", &model) || snug_stepper_new(model, settings, &stepper)) {
 *     puts(snug_last_error());
 *   }
 *
 * No exception leaves a function. A function that returns a status writes its results where it succeeds alone. A handle
 * may be used by one thread at a time, each time by another one, and be freed by any. Functions that free take null.
 * Strings that are returned belong to their handle. Texts are UTF-8; paths are bytes, as the system takes them. More in
 * docs/c.md. */

#include <stddef.h>
#include <stdint.h>

#define SNUG_C_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Grows with each release that adds a function, a setting or a member of snug_step. What is there is not changed: that
 * takes another name of the library, libsnug_c.so.2. */
#define SNUG_C_VERSION 1

/* --- errors */

typedef enum snug_status {
  SNUG_OK = 0,
  SNUG_ERROR = 1,            /* what is none of the following; of files that cannot be read, too */
  SNUG_INVALID_ARGUMENT = 2, /* an option, call or array that cannot work */
  SNUG_CORRUPT_FILE = 3,
  SNUG_OUT_OF_MEMORY = 4,
  SNUG_BUDGET_EXCEEDED = 5 /* see snug_last_smallest_budget */
} snug_status;

/* SNUG_C_VERSION of the library that is loaded. */
SNUG_C_API int snug_c_version(void);
/* The text of this thread's last error, until its next one; "" where there was none. It belongs to the thread, since a
 * function that fails to make a handle has no handle to keep it. */
SNUG_C_API const char* snug_last_error(void);
/* After SNUG_BUDGET_EXCEEDED: the fewest bytes that would do; 0 where that is not known. */
SNUG_C_API int64_t snug_last_smallest_budget(void);

/* --- arrays */

/* An enum is 32 bits wide. */
typedef enum snug_dtype {
  SNUG_FLOAT32 = 1,
  SNUG_FLOAT64 = 2,
  SNUG_FLOAT16 = 3,
  SNUG_BFLOAT16 = 4,
  SNUG_INT64 = 5,
  SNUG_INT32 = 6,
  SNUG_INT16 = 7,
  SNUG_INT8 = 8,
  SNUG_UINT8 = 9,
  SNUG_BOOL = 10
} snug_dtype;

/* Numbers in the memory of the CPU, in the order of C, without gaps, at an address that their size divides. `data` may
 * be null where a size is 0. An item of SNUG_BOOL is a byte, 0 or 1. Functions read arrays that they are given until
 * they return, and keep nothing of them. */
typedef struct snug_array {
  void* data;
  const int64_t* sizes; /* as many as `dimensions` */
  size_t dimensions;
  snug_dtype dtype;
} snug_array;

/* --- models */

typedef struct snug_model snug_model;

/* Reads a file as snug::load_exported does (python/snug_export.py makes it). Free it by snug_model_free. */
SNUG_C_API snug_status snug_model_load(const char* file, snug_model** model);
SNUG_C_API void snug_model_free(snug_model* model);

/* 0 for a null model. */
SNUG_C_API size_t snug_model_input_count(const snug_model* model);
SNUG_C_API size_t snug_model_output_count(const snug_model* model);
/* Null for a null model and for an index that is too large. */
SNUG_C_API const char* snug_model_input_name(const snug_model* model, size_t index);
SNUG_C_API const char* snug_model_output_name(const snug_model* model, size_t index);

/* Moves a model from the CPU to a device of LibTorch, such as "cuda" or "cuda:1", before a stepper is made. Arrays stay
 * on the CPU: batches and outputs are copied. */
SNUG_C_API snug_status snug_model_to(snug_model* model, const char* device);
/* The same for a model whose weights the device has no room for. Weights of 64 KiB and more stay in page-locked memory
 * of the host, and come to the device in the steps of a stepper with the settings `memory` and `offload`. Until the
 * first step nothing else can read them. */
SNUG_C_API snug_status snug_model_move_with_weights_on_host(snug_model* model, const char* device);

/* Parameters and buffers, in the order of their names, tied ones once. The array is of the model's own memory: it may
 * be read and written between steps, until the model is freed. Of a model on a device there are names and no arrays:
 * save the weights. */
SNUG_C_API size_t snug_model_tensor_count(const snug_model* model);
SNUG_C_API const char* snug_model_tensor_name(const snug_model* model, size_t index);
SNUG_C_API snug_status snug_model_tensor(const snug_model* model, const char* name, snug_array* tensor);

/* Chooses the graph for training (1, as loaded) or for evaluation (0). */
SNUG_C_API snug_status snug_model_train(snug_model* model, int on);
/* Parameters and buffers as .safetensors. A file that lacks one, has one that the model lacks, or one of another type
 * or other sizes is SNUG_INVALID_ARGUMENT, and changes nothing. Tied ones may stand under any of their names. Weights
 * in several files load by their index, model.safetensors.index.json. */
SNUG_C_API snug_status snug_model_save_weights(const snug_model* model, const char* file);
SNUG_C_API snug_status snug_model_load_weights(snug_model* model, const char* file);

/* Outputs of a forward pass. Free them by snug_results_free. */
typedef struct snug_results snug_results;

/* All outputs of a forward pass without gradients, of arrays in the order of the inputs. */
SNUG_C_API snug_status snug_model_forward(snug_model* model, const snug_array* inputs, size_t count,
                                          snug_results** results);
SNUG_C_API size_t snug_results_count(const snug_results* results);
/* The array's memory is that of `results`. */
SNUG_C_API snug_status snug_results_get(const snug_results* results, size_t index, snug_array* array);
SNUG_C_API void snug_results_free(snug_results* results);

/* --- steps */

typedef struct snug_stepper snug_stepper;

/* Steps of a model whose first output is its loss: a scalar, the mean over the items of dimension 0. `settings` are
 * texts NAME=VALUE, with null at the end; null for none:
 *   optimizer     adamw, adam, sgd or adamw8bit; adamw if it is not named
 *   lr, weight_decay, beta1, beta2, eps; of sgd lr, weight_decay, momentum
 *   memory        the most bytes of tensors during a step, such as 1GiB; without it there is no budget
 *   micro_batch   items at a time; 0, as it is by itself: all, or with `memory` as many as is fastest
 *   clip_norm     largest norm of all gradients together; 0: no clipping
 *   precision     float32, bfloat16, float16 or auto
 *   offload       a directory on a disk that activations may go to, and the optimizer's state, weights and gradients
 *                 if nothing fits otherwise. Empty (offload=), for a model on a device: the host's memory
 *   plan_folder   a directory that keeps plans for the next program
 * Another name, or a value that cannot be, is SNUG_INVALID_ARGUMENT. The stepper keeps the model alive. */
SNUG_C_API snug_status snug_stepper_new(snug_model* model, const char* const* settings, snug_stepper** stepper);
SNUG_C_API void snug_stepper_free(snug_stepper* stepper);

/* What a step did. Times are in seconds, memory in bytes. */
typedef struct snug_step {
  size_t size; /* sizeof(snug_step), set by the caller: later versions add members at the end. Members that the library
                * does not know stay as they are */
  double loss, grad_norm, seconds;
  int64_t stepped; /* 0 where gradients were not finite, in float16 */
  int64_t micro_batches, items, peak_bytes;
} snug_step;

/* One step of the optimizer over the arrays of all inputs. A step that fails leaves the parameters as they were.
 * `result` may be null. */
SNUG_C_API snug_status snug_stepper_step(snug_stepper* stepper, const snug_array* inputs, size_t count,
                                         snug_step* result);
/* Plans for such arrays, as the first step would. `peak_bytes`, which may be null: what the step takes; 0 without a
 * budget. */
SNUG_C_API snug_status snug_stepper_plan(snug_stepper* stepper, const snug_array* inputs, size_t count,
                                         int64_t* peak_bytes);
/* The plan of the last step, for people; "" where there is none. Until the next call with this stepper. */
SNUG_C_API const char* snug_stepper_explain(snug_stepper* stepper);
SNUG_C_API snug_status snug_stepper_set_lr(snug_stepper* stepper, double lr);

/* Model, optimizer, stepper and random numbers as a snapshot in a directory, which keeps the last three: whole, or not
 * there. */
SNUG_C_API snug_status snug_stepper_save(snug_stepper* stepper, const char* directory, int64_t step);
/* Goes on from the newest snapshot. *step is its number, -1 where there is none. A snapshot that is damaged is
 * SNUG_CORRUPT_FILE, and changes nothing. After any other error, model and stepper may be of the snapshot in part. */
SNUG_C_API snug_status snug_stepper_load(snug_stepper* stepper, const char* directory, int64_t* step);

/* --- memory of the CPU, and random numbers */

/* Bytes of all tensors that are alive in the process. */
SNUG_C_API int64_t snug_live_bytes(void);

/* Counts bytes of tensors from the moment it is made. */
typedef struct snug_meter snug_meter;
SNUG_C_API snug_status snug_meter_new(snug_meter** meter);
/* Bytes above the level at which the meter began: now, and at most. */
SNUG_C_API snug_status snug_meter_read(const snug_meter* meter, int64_t* live_bytes, int64_t* peak_bytes);
SNUG_C_API void snug_meter_free(snug_meter* meter);

/* A hard limit on bytes of tensors. */
typedef struct snug_limit snug_limit;
/* While it is there, an allocation beyond `bytes` of all tensors together is SNUG_OUT_OF_MEMORY. So is this call if
 * more is taken already. */
SNUG_C_API snug_status snug_limit_new(int64_t bytes, snug_limit** limit);
SNUG_C_API void snug_limit_free(snug_limit* limit);

/* As torch.manual_seed and torch.set_num_threads. */
SNUG_C_API snug_status snug_manual_seed(uint64_t seed);
SNUG_C_API snug_status snug_set_threads(int count);

#ifdef __cplusplus
}
#endif
#endif
