#pragma once
// The zoo: models of many kinds, for questions about "any graph". A plain step of each takes 50 to 500 ms of one core.

#include "benchmarks/zoo/captioning.h"
#include "benchmarks/zoo/entry.h"
#include "benchmarks/zoo/glow.h"
#include "benchmarks/zoo/gpt2.h"
#include "benchmarks/zoo/graph_network.h"
#include "benchmarks/zoo/long_lstm.h"
#include "benchmarks/zoo/nerf.h"
#include "benchmarks/zoo/pixel_cnn.h"
#include "benchmarks/zoo/pixel_snail.h"
#include "benchmarks/zoo/rollout.h"
#include "benchmarks/zoo/unet.h"
#include "benchmarks/zoo/vq_vae.h"
#include "benchmarks/zoo/wgan.h"

namespace snug::zoo {

inline std::vector<Species> zoo() {
  return {
      {"gpt2", [] { return make_gpt2(); }},
      {"captioning", make_captioning},
      {"glow", make_glow},
      {"pixel_cnn", make_pixel_cnn},
      {"pixel_snail", make_pixel_snail},
      {"nerf", make_nerf},
      {"graph_network", make_graph_network},
      {"rollout", make_rollout},
      {"wgan", make_wgan},
      {"unet", make_unet},
      {"vq_vae", make_vq_vae},
  };
}

}  // namespace snug::zoo
