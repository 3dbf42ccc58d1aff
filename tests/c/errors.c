/* Errors come back as codes with texts, and leave the caller's handle as it was. */
#include <stdio.h>
#include <string.h>

#include <snug/c.h>

#define CHECK(what) \
  if (!(what)) return fprintf(stderr, "line %d: %s; %s\n", __LINE__, #what, snug_last_error()), 1

#define REFUSES(call) CHECK((call) == SNUG_INVALID_ARGUMENT && strstr(snug_last_error(), "is null"))

int main(void) {
  const char* damaged = "c_errors_damaged.pt2";
  snug_model* model = NULL;
  snug_array tensor = {NULL, NULL, 0, SNUG_FLOAT32};
  snug_results* results = NULL;
  snug_stepper* stepper = NULL;
  snug_limit* limit = NULL;
  int64_t number = -7;
  FILE* file = fopen(damaged, "wb");
  CHECK(file && fputs("not an archive", file) >= 0 && fclose(file) == 0);
  CHECK(snug_c_version() == SNUG_C_VERSION);
  CHECK(strcmp(snug_last_error(), "") == 0);
  CHECK(snug_model_load(NULL, &model) == SNUG_INVALID_ARGUMENT && strstr(snug_last_error(), "null"));
  CHECK(snug_model_load(damaged, NULL) == SNUG_INVALID_ARGUMENT);
  CHECK(snug_model_load("no_such_file.pt2", &model) == SNUG_ERROR && strstr(snug_last_error(), "no_such_file"));
  CHECK(snug_model_load(damaged, &model) == SNUG_CORRUPT_FILE && strstr(snug_last_error(), damaged));
  CHECK(model == NULL && snug_model_input_count(model) == 0 && snug_model_output_name(model, 0) == NULL);
  snug_model_free(model);

  /* Null in each place. */
  CHECK(snug_model_input_count(NULL) == 0 && snug_model_output_count(NULL) == 0 && snug_model_tensor_count(NULL) == 0);
  CHECK(!snug_model_input_name(NULL, 0) && !snug_model_output_name(NULL, 0) && !snug_model_tensor_name(NULL, 0));
  CHECK(snug_results_count(NULL) == 0 && strcmp(snug_stepper_explain(NULL), "") == 0);
  REFUSES(snug_model_tensor(NULL, "x", &tensor));
  REFUSES(snug_model_train(NULL, 1));
  REFUSES(snug_model_to(NULL, "cuda"));
  REFUSES(snug_model_move_with_weights_on_host(NULL, "cuda"));
  REFUSES(snug_model_save_weights(NULL, damaged));
  REFUSES(snug_model_load_weights(NULL, damaged));
  REFUSES(snug_model_forward(NULL, NULL, 0, &results));
  REFUSES(snug_results_get(NULL, 0, &tensor));
  REFUSES(snug_stepper_new(NULL, NULL, &stepper));
  REFUSES(snug_stepper_step(NULL, NULL, 0, NULL));
  REFUSES(snug_stepper_plan(NULL, NULL, 0, NULL));
  REFUSES(snug_stepper_set_lr(NULL, 0));
  REFUSES(snug_stepper_save(NULL, "c_errors", 0));
  REFUSES(snug_stepper_load(NULL, "c_errors", &number));
  REFUSES(snug_meter_new(NULL));
  REFUSES(snug_meter_read(NULL, &number, &number));
  REFUSES(snug_limit_new(1, NULL));
  snug_results_free(NULL);
  snug_stepper_free(NULL);
  snug_meter_free(NULL);
  snug_limit_free(NULL);
  CHECK(tensor.data == NULL && results == NULL && stepper == NULL && number == -7);

  CHECK(snug_limit_new(-1, &limit) == SNUG_INVALID_ARGUMENT && strstr(snug_last_error(), "-1") && limit == NULL);
  CHECK(snug_set_threads(0) == SNUG_INVALID_ARGUMENT && strstr(snug_last_error(), "0 threads"));
  return remove(damaged) != 0;
}
