/* Errors come back as codes with texts, and leave the caller's handle as it was. */
#include <stdio.h>
#include <string.h>

#include <snug/c.h>

#define CHECK(what) \
  if (!(what)) return fprintf(stderr, "line %d: %s; %s\n", __LINE__, #what, snug_last_error()), 1

int main(void) {
  const char* damaged = "c_errors_damaged.pt2";
  snug_model* model = NULL;
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
  return remove(damaged) != 0;
}
