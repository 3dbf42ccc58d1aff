#pragma once
// backward_each: several losses on one trunk, with the activations of one head alive at a time. The sum of the losses keeps those of all
// heads until backward.
//
//   auto losses = snug::backward_each([&] { return trunk->forward(x); },
//                                     {[&](Tensor h) { return depth->forward(h); }, [&](Tensor h) { return edges->forward(h); }},
//                                     {[&](Tensor y) { return mse_loss(y, depths); }, [&](Tensor y) { return bce_loss(y, borders); }});

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

class GradScaler;

/// For each head, the last first: `head(h)` forward, with h equal to `trunk_output`, and backward as far as h; then one backward through the
/// trunk. Gradients are added to .grad() as the backward of the sum of the losses would, and equal it to the bit: in that backward, too, the
/// heads' gradients arrive at the trunk's output one by one, the last head's first. (Rounding may differ where a parameter that already has
/// a gradient is used by two heads, or by a head and the trunk.) Random numbers are drawn in the order of the calls: the last head first.
/// Each head returns its loss, one number; weight losses in there. `scaler`, if given, scales every loss. Runs under the caller's
/// Autocast; the backward passes run without, as they should. A trunk output that needs no gradient stays as it is.
/// Returns the losses, unscaled and detached, in the order of `heads`. Throws ConfigError if there is no head, or if a loss is not one
/// number or depends on nothing that needs a gradient; then, and if a head throws, .grad() has what the later heads gave.
std::vector<at::Tensor> backward_each(const at::Tensor& trunk_output,
                                      const std::vector<std::function<at::Tensor(at::Tensor)>>& heads,
                                      GradScaler* scaler = nullptr);

/// The same for the trunk as a callable, with the loss of head i as `losses[i]` of what `heads[i]` returns. Throws ConfigError if their
/// numbers differ.
std::vector<at::Tensor> backward_each(const std::function<at::Tensor()>& trunk,
                                      const std::vector<std::function<at::Tensor(at::Tensor)>>& heads,
                                      const std::vector<std::function<at::Tensor(at::Tensor)>>& losses,
                                      GradScaler* scaler = nullptr);

}  // namespace snug
