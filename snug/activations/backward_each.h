#pragma once
// backward_each: several losses on one trunk, with the activations of only one head alive at a time. Backward of the
// sum of the losses would keep the activations of all heads.
//
//   auto losses = snug::backward_each([&] { return trunk->forward(x); },
//                                     {[&](Tensor h) { return depth->forward(h); },
//                                      [&](Tensor h) { return edges->forward(h); }},
//                                     {[&](Tensor y) { return mse_loss(y, depths); },
//                                      [&](Tensor y) { return bce_loss(y, borders); }});

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

class GradScaler;

/// Takes the heads one by one, the last one first: forward of `head(h)`, with h equal to `trunk_output`, then backward
/// as far as h. At the end one backward goes through the trunk.
/// - Gradients are added to .grad(). They equal those of backward of the sum of the losses to the bit, because there,
///   too, the heads' gradients arrive at the trunk's output one by one, the last head's first. Rounding may differ if a
///   parameter that already has a gradient is used by two heads, or by a head and the trunk.
/// - Random numbers are drawn in the order of the calls: for the last head first.
/// - Each head returns its loss, one number. Put the weights of the losses into the heads. `scaler`, if given, scales
///   every loss.
/// - Forward runs under the caller's Autocast, backward without it, as it should.
/// - If `trunk_output` needs no gradient, there is no backward through the trunk.
/// Returns the losses, unscaled and detached, in the order of `heads`. Throws ConfigError if there is no head, or if a
/// loss is not one number or depends on nothing that needs a gradient. If it or a head throws, .grad() has the
/// gradients of the heads that were done.
std::vector<at::Tensor> backward_each(const at::Tensor& trunk_output,
                                      const std::vector<std::function<at::Tensor(at::Tensor)>>& heads,
                                      GradScaler* scaler = nullptr);

/// The same for a trunk that is a callable. The loss of head i is `losses[i]` of the result of `heads[i]`. Throws
/// ConfigError if there are not as many losses as heads.
std::vector<at::Tensor> backward_each(const std::function<at::Tensor()>& trunk,
                                      const std::vector<std::function<at::Tensor(at::Tensor)>>& heads,
                                      const std::vector<std::function<at::Tensor(at::Tensor)>>& losses,
                                      GradScaler* scaler = nullptr);

}  // namespace snug
