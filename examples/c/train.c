/* Trains a model that Python saved by torch.export, in C. It takes rows of 16 numbers and a class of 4, and returns its
 * loss.
 *
 *   train_c MODEL.pt2 */

#include <stdio.h>
#include <stdlib.h>

#include <snug/c.h>

enum { ROWS = 64, WIDTH = 16, CLASSES = 4 };

static void check(snug_status status) {
  if (status != SNUG_OK) {
    fprintf(stderr, "%s\n", snug_last_error());
    exit(1);
  }
}

int main(int argc, char** argv) {
  const char* settings[] = {"optimizer=adamw", "lr=1e-2", "memory=64MiB", NULL};
  static float x[ROWS * WIDTH];
  static int64_t y[ROWS];
  const int64_t x_sizes[] = {ROWS, WIDTH}, y_sizes[] = {ROWS};
  const snug_array batch[] = {{x, x_sizes, 2, SNUG_FLOAT32}, {y, y_sizes, 1, SNUG_INT64}};
  snug_model* model = NULL;
  snug_stepper* stepper = NULL;
  int i, step;

  if (argc != 2) {
    fprintf(stderr, "usage: train_c MODEL.pt2\n");
    return 2;
  }
  check(snug_model_load(argv[1], &model));
  check(snug_stepper_new(model, settings, &stepper));
  srand(1);
  for (i = 0; i < ROWS * WIDTH; ++i) {
    x[i] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
  }
  for (i = 0; i < ROWS; ++i) { /* the class is the place of the largest of the first four */
    int k, largest = 0;
    for (k = 1; k < CLASSES; ++k) {
      largest = x[i * WIDTH + k] > x[i * WIDTH + largest] ? k : largest;
    }
    y[i] = largest;
  }
  for (step = 1; step <= 50; ++step) {
    snug_step result = {sizeof(snug_step)};
    check(snug_stepper_step(stepper, batch, 2, &result));
    if (step % 10 == 0) {
      printf("step %d  loss %f\n", step, result.loss);
    }
  }
  check(snug_model_save_weights(model, "trained.safetensors"));
  snug_stepper_free(stepper);
  snug_model_free(model);
  return 0;
}
