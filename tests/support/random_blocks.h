#pragma once
// The blocks of which random_model.cpp makes models. Each registers its modules with a Build and gives back a function
// that keeps the shape of what it takes: [batch, time, width], or [batch, width, side, side] for pictures.

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "snug/autocast.h"

namespace snug::testing::blocks {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;
using Layer = std::function<Tensor(const Tensor&)>;

/// Where a block gets its numbers from and registers its modules.
class Build {
 public:
  Build(nn::Module& owner, uint64_t seed) : owner_(owner), random_(seed) {}

  int64_t width = 0;
  std::shared_ptr<std::vector<Tensor>> kept = std::make_shared<std::vector<Tensor>>();  // results, by the program

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool maybe() { return below(2) == 0; }
  int64_t even(int64_t least, int64_t most) { return 2 * (least / 2 + below((most - least) / 2 + 1)); }

  template <class Holder>
  auto add(Holder module) {
    owner_.register_module(std::to_string(modules_++), module);
    return module.ptr();
  }
  auto linear(int64_t in, int64_t out) { return add(nn::Linear(in, out)); }
  auto conv(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1) {
    return add(nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2)));
  }
  auto norm() { return add(nn::LayerNorm(nn::LayerNormOptions({width}))); }
  Tensor buffer(Tensor value) { return owner_.register_buffer(fmt::format("buffer{}", modules_++), std::move(value)); }

 private:
  nn::Module& owner_;
  std::mt19937_64 random_;
  int64_t modules_ = 0;
};

inline Tensor activation(int64_t which, const Tensor& x) {
  switch (which) {
    case 0:
      return torch::gelu(x);
    case 1:
      return torch::relu(x);
    case 2:
      return torch::tanh(x);
    case 3:
      return torch::silu(x);
    default:
      return F::softplus(x);
  }
}

// Sequences: [batch, time, width].

inline Layer chain(Build& b) {
  std::vector<std::pair<std::shared_ptr<nn::LinearImpl>, int64_t>> parts;
  int64_t in = b.width;
  for (int64_t i = 2 + b.below(3); i > 0; --i) {
    const int64_t out = i == 1 ? b.width : b.even(8, 4 * b.width);
    parts.emplace_back(b.linear(in, out), b.below(5));
    in = out;
  }
  return [=](Tensor x) {
    for (const auto& [linear, kind] : parts) {
      x = activation(kind, linear->forward(x));
    }
    return x;
  };
}

inline Layer residual(Build& b) {
  const auto norm = b.norm();
  const auto up = b.linear(b.width, 4 * b.width), down = b.linear(4 * b.width, b.width);
  return [=](const Tensor& x) {
    return x + down->forward(F::gelu(up->forward(norm->forward(x)), F::GELUFuncOptions().approximate("tanh")));
  };
}

inline Layer in_place(Build& b) {
  const auto first = b.linear(b.width, b.width), second = b.linear(b.width, b.width);
  const double factor = 0.5 + 0.1 * static_cast<double>(b.below(5));
  const bool leaky = b.maybe();
  return [=](const Tensor& x) {
    Tensor h = first->forward(x).add_(x);
    h = leaky ? torch::leaky_relu_(h, 0.1) : h.relu_();
    return second->forward(h).mul_(factor).add_(x).sigmoid_();
  };
}

// Writes through views and into slices of a fresh tensor.
inline Layer view_writes(Build& b) {
  const auto first = b.linear(b.width, b.width), second = b.linear(b.width, b.width);
  const int64_t part = b.even(2, b.width - 2);
  return [=](const Tensor& x) {
    const Tensor h = first->forward(x);
    h.narrow(-1, 0, part).mul_(0.5);
    h.select(1, 0).add_(1);
    const Tensor both = torch::empty_like(h);
    both.narrow(-1, 0, part).copy_(h.narrow(-1, 0, part).tanh());
    both.narrow(-1, part, h.size(-1) - part).copy_(h.narrow(-1, part, h.size(-1) - part));
    return second->forward(both);
  };
}

inline Layer dropout(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  const auto drop = b.add(nn::Dropout(nn::DropoutOptions(0.1 + 0.1 * static_cast<double>(b.below(5)))));
  const auto in_place = b.add(nn::Dropout(nn::DropoutOptions(0.2).inplace(true)));
  return [=](const Tensor& x) { return in_place->forward(linear->forward(drop->forward(x).tanh())) + x; };
}

inline Tensor heads_of(const Tensor& x, int64_t heads) {
  return x.unflatten(-1, {heads, x.size(-1) / heads}).transpose(1, 2);
}

inline Layer attention_by_hand(Build& b) {
  const auto qkv = b.linear(b.width, 3 * b.width), out = b.linear(b.width, b.width);
  const auto drop = b.add(nn::Dropout(0.1));
  const bool masked = b.maybe();
  return [=](const Tensor& x) {
    const auto parts = qkv->forward(x).chunk(3, -1);
    const Tensor key = heads_of(parts[1], 2).transpose(-1, -2);
    Tensor scores = torch::matmul(heads_of(parts[0], 2), key) / std::sqrt(static_cast<double>(x.size(-1)) / 2);
    if (masked) {
      scores.masked_fill_(torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1), -1e9);
    }
    const Tensor mixed = torch::matmul(drop->forward(torch::softmax(scores, -1)), heads_of(parts[2], 2));
    return x + out->forward(mixed.transpose(1, 2).flatten(2));
  };
}

inline Layer fused_attention(Build& b) {
  const auto norm = b.norm();
  const auto qkv = b.linear(b.width, 3 * b.width), out = b.linear(b.width, b.width);
  const double p = b.maybe() ? 0.1 : 0.0;  // with dropout it is made of single operators
  return [=](const Tensor& x) {
    const auto parts = qkv->forward(norm->forward(x)).split(x.size(-1), -1);
    const Tensor mixed = torch::scaled_dot_product_attention(heads_of(parts[0], 2), heads_of(parts[1], 2),
                                                             heads_of(parts[2], 2), {}, p, /*is_causal=*/true);
    return x + out->forward(mixed.transpose(1, 2).reshape(x.sizes()));
  };
}

inline Layer lstm(Build& b) {
  const bool both_ways = b.maybe();
  const int64_t layers = 1 + b.below(2);
  const auto cell = b.add(nn::LSTM(nn::LSTMOptions(b.width, both_ways ? b.width / 2 : b.width)
                                       .batch_first(true)
                                       .bidirectional(both_ways)
                                       .num_layers(layers)
                                       .dropout(layers > 1 ? 0.1 : 0.0)));
  return [=](const Tensor& x) { return std::get<0>(cell->forward(x)); };
}

inline Layer gru(Build& b) {
  const auto cell = b.add(nn::GRU(nn::GRUOptions(b.width, b.width).batch_first(true)));
  return [=](const Tensor& x) { return x + std::get<0>(cell->forward(x)); };
}

// Step by step: the cells of LibTorch, which write their gates in place in parts of one tensor, each with a count of
// writes of its own.
inline Layer recurrent_cells(Build& b) {
  const bool is_lstm = b.maybe();
  const auto gru = is_lstm ? nullptr : b.add(nn::GRUCell(b.width, b.width));
  const auto lstm = is_lstm ? b.add(nn::LSTMCell(b.width, b.width)) : nullptr;
  return [=](const Tensor& x) {
    Tensor hidden = torch::zeros({x.size(0), x.size(2)}), cell = hidden;
    std::vector<Tensor> steps;
    for (const Tensor& step : x.narrow(1, 0, 4).unbind(1)) {
      if (is_lstm) {
        std::tie(hidden, cell) = lstm->forward(step, std::tuple(hidden, cell));
      } else {
        hidden = gru->forward(step, hidden);
      }
      steps.push_back(hidden);
    }
    return torch::cat({torch::stack(steps, 1), x.narrow(1, 4, x.size(1) - 4)}, 1);
  };
}

// Its noise is saved before it is filled.
inline Layer random_leak(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  const bool in_place = b.maybe();
  return [=](const Tensor& x) {
    Tensor h = linear->forward(x);
    return in_place ? torch::rrelu_(h, 0.1, 0.4, /*training=*/true) : torch::rrelu(h, 0.1, 0.4, /*training=*/true);
  };
}

// Reads a table and a queue that it does not write, whole and in part.
inline Layer reads_buffers(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  const Tensor table = b.buffer(torch::randn({64, b.width})), queue = b.buffer(torch::randn({b.width, 8}));
  return [=](const Tensor& x) {
    const Tensor h = linear->forward(x) + table.narrow(0, 0, x.size(1)) * table.narrow(0, 7, x.size(1));
    return h + torch::softmax(h.matmul(queue.clone().detach()), -1).matmul(queue.t()) + torch::zeros_like(table[0]);
  };
}

inline Layer dense_concatenation(Build& b) {
  std::vector<std::shared_ptr<nn::LinearImpl>> parts;
  int64_t in = b.width;
  for (int64_t i = 2 + b.below(3); i > 0; --i) {
    const int64_t grown = b.even(4, b.width);
    parts.push_back(b.linear(in, grown));
    in += grown;
  }
  const auto last = b.linear(in, b.width);
  return [=](const Tensor& x) {
    std::vector<Tensor> features{x};
    for (const auto& part : parts) {
      features.push_back(torch::relu(part->forward(torch::cat(features, -1))));
    }
    return last->forward(torch::cat(features, -1));
  };
}

// A U of linear layers: narrower and narrower, then wider again with what was there on the way down.
inline Layer skips(Build& b) {
  const int64_t half = b.width / 2, quarter = std::max<int64_t>(2, b.width / 4);
  const auto down1 = b.linear(b.width, half), down2 = b.linear(half, quarter), up1 = b.linear(quarter, half),
             up2 = b.linear(2 * half, b.width);
  return [=](const Tensor& x) {
    const Tensor one = torch::gelu(down1->forward(x));
    const Tensor two = torch::gelu(down2->forward(one));
    return up2->forward(torch::cat({torch::gelu(up1->forward(two)), one}, -1)) + x;
  };
}

inline Layer shared_weights(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  const int64_t times = 2 + b.below(3);
  return [=](Tensor x) {
    for (int64_t i = 0; i < times; ++i) {
      x = torch::tanh(linear->forward(x));
    }
    return torch::matmul(x, linear->weight);  // and once transposed
  };
}

inline Layer chunks(Build& b) {
  const auto wide = b.linear(b.width, 2 * b.width), back = b.linear(b.width, b.width);
  const int64_t part = 1 + b.below(b.width - 1);
  return [=](const Tensor& x) {
    const auto halves = wide->forward(x).chunk(2, -1);
    const auto parts = (halves[0] * halves[1].sigmoid()).split_with_sizes({part, x.size(-1) - part}, -1);
    return back->forward(torch::cat({parts[1], parts[0].exp().log1p()}, -1));
  };
}

inline Layer views(Build& b) {
  const auto over_time = b.linear(b.width, b.width);
  const auto scale = b.linear(1, b.width);
  return [=](const Tensor& x) {
    const Tensor turned = x.transpose(0, 1).contiguous().permute({1, 0, 2}).flip({1});
    const Tensor pooled = turned.reshape({x.size(0), -1, 1}).mean(1, true).expand({x.size(0), x.size(1), 1});
    return over_time->forward(turned.flatten(0, 1)).view_as(x) * scale->forward(pooled) + x.detach();
  };
}

inline Layer autocast(Build& b) {
  const auto first = b.linear(b.width, 2 * b.width), middle = b.linear(2 * b.width, b.width),
             last = b.linear(b.width, b.width);
  const bool cache = b.maybe();
  return [=](const Tensor& x) {
    const Autocast low(x.device().type(), torch::kBFloat16, {.cache = cache});
    Tensor h = torch::gelu(first->forward(x));
    {
      const Autocast full(x.device().type(), torch::kBFloat16, {.enabled = false});
      h = torch::softmax(middle->forward(h.to(torch::kFloat)), -1);
    }
    return (last->forward(h) + last->forward(x).relu_()).to(torch::kFloat);
  };
}

inline Layer batch_norm(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  const auto norm = b.add(nn::BatchNorm1d(b.width));
  const bool by_time = b.maybe();
  return [=](const Tensor& x) {
    const Tensor h = linear->forward(x);
    return by_time ? norm->forward(h.transpose(1, 2)).transpose(1, 2).relu()
                   : norm->forward(h.flatten(0, 1)).view_as(x).relu_();
  };
}

inline Layer convolution_1d(Build& b) {
  const auto depthwise = b.add(nn::Conv1d(nn::Conv1dOptions(b.width, b.width, 3).padding(2).groups(b.width)));
  const auto pointwise = b.add(nn::Conv1d(nn::Conv1dOptions(b.width, b.width, 1)));
  return [=](const Tensor& x) {
    const Tensor h = depthwise->forward(x.transpose(1, 2)).narrow(-1, 0, x.size(1));
    return pointwise->forward(torch::silu(h)).transpose(1, 2) + x;
  };
}

// A module that keeps statistics of its own, without autograd, and reads them too.
inline Layer running_buffer(Build& b) {
  const Tensor mean = b.buffer(torch::zeros({b.width}));
  const auto linear = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    const Tensor centred = x - mean;
    {
      const torch::NoGradGuard no_grad;
      mean.mul_(0.9).add_(x.mean(torch::IntArrayRef{0, 1}), 0.1);
    }
    return linear->forward(centred).tanh();
  };
}

// Saves what is neither its input nor its result.
struct Cube : torch::autograd::Function<Cube> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const Tensor square = x * x;
    context->save_for_backward({square});
    return square * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {3 * gradients[0] * context->get_saved_variables()[0]};
  }
};

inline Layer custom_function(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  return [=](const Tensor& x) { return Cube::apply(linear->forward(x).tanh()) + x; };
}

// Forces from an energy: a backward pass inside the forward pass, with a graph of its own or not.
inline Layer slope(Build& b) {
  const auto first = b.linear(b.width, b.width), up = b.linear(b.width, 2 * b.width), last = b.linear(b.width, b.width);
  const int64_t kind = b.below(5);
  const bool has_graph = b.maybe();
  return [=](const Tensor& x) {
    const Tensor h = first->forward(x).tanh();
    const Tensor place = has_graph ? h : h.detach().requires_grad_(true);
    const Tensor energy = activation(kind, up->forward(place)).square().sum() + place.sin().sum();
    const Tensor force =
        torch::autograd::grad({energy}, {place}, {}, /*retain_graph=*/has_graph, /*create_graph=*/has_graph)[0];
    return last->forward(force).tanh() + torch::sigmoid(up->forward(h)).narrow(-1, 0, x.size(-1));
  };
}

inline Layer many_operators(Build& b) {
  const auto linear = b.linear(b.width, b.width);
  return [=](const Tensor& x) {
    const Tensor h = linear->forward(x);
    const Tensor bent = torch::where(h > 0, h, 0.1 * h).clamp(-2, 2);
    const auto [sorted, order] = bent.sort(-1);
    const Tensor gathered = bent.gather(-1, order.flip({-1})).cumsum(1) / static_cast<double>(x.size(1));
    return gathered + sorted.index_select(1, torch::arange(x.size(1)).flip({0})).square().sum(-1, true).sqrt();
  };
}

// Pictures: [batch, channels, side, side].

inline Layer convolution(Build& b) {
  const int64_t hidden = b.even(4, 3 * b.width);
  const auto first = b.conv(b.width, hidden, 3), second = b.conv(hidden, b.width, 1);
  return [=](const Tensor& x) { return second->forward(first->forward(x).relu_()); };
}

inline Layer residual_batch_norm(Build& b) {
  const auto first = b.conv(b.width, b.width, 3), second = b.conv(b.width, b.width, 3);
  const auto norm1 = b.add(nn::BatchNorm2d(b.width)), norm2 = b.add(nn::BatchNorm2d(b.width));
  return [=](const Tensor& x) {
    Tensor h = norm2->forward(second->forward(norm1->forward(first->forward(x)).relu_()));
    h += x;
    return h.relu_();
  };
}

inline Layer u_net(Build& b) {
  const auto in = b.conv(b.width, b.width, 3), down = b.conv(b.width, 2 * b.width, 3, 2),
             bottom = b.conv(2 * b.width, 2 * b.width, 3), out = b.conv(2 * b.width, b.width, 3);
  const auto up = b.add(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2 * b.width, b.width, 2).stride(2)));
  return [=](const Tensor& x) {
    const Tensor wide = in->forward(x).relu_();
    const Tensor deep = bottom->forward(down->forward(wide).relu_()).relu_();
    return out->forward(torch::cat({up->forward(deep), wide}, 1));
  };
}

inline Layer dense_net(Build& b) {
  std::vector<std::pair<std::shared_ptr<nn::BatchNorm2dImpl>, std::shared_ptr<nn::Conv2dImpl>>> parts;
  int64_t channels = b.width;
  for (int64_t i = 2 + b.below(2); i > 0; --i) {
    const int64_t grown = b.even(2, 8);
    parts.emplace_back(b.add(nn::BatchNorm2d(channels)), b.conv(channels, grown, 3));
    channels += grown;
  }
  const auto last = b.conv(channels, b.width, 1);
  return [=](Tensor x) {
    for (const auto& [norm, conv] : parts) {
      x = torch::cat({x, conv->forward(norm->forward(x).relu_())}, 1);
    }
    return last->forward(x);
  };
}

inline Layer pooling(Build& b) {
  const auto conv = b.conv(b.width, b.width, 3);
  const bool largest = b.maybe();
  return [=](const Tensor& x) {
    const Tensor small = largest ? torch::max_pool2d(conv->forward(x), 2) : torch::avg_pool2d(conv->forward(x), 2);
    return torch::upsample_nearest2d(small, {x.size(2), x.size(3)}) + x;
  };
}

inline Layer group_norm(Build& b) {
  const auto depthwise =
      b.add(nn::Conv2d(nn::Conv2dOptions(b.width, b.width, 3).padding(1).groups(b.width).bias(false)));
  const auto norm = b.add(nn::GroupNorm(2, b.width));
  const auto pointwise = b.conv(b.width, b.width, 1);
  return [=](const Tensor& x) { return x + pointwise->forward(F::hardtanh(norm->forward(depthwise->forward(x)))); };
}

inline Layer convolution_autocast(Build& b) {
  const auto first = b.conv(b.width, b.width, 3), second = b.conv(b.width, b.width, 1);
  return [=](const Tensor& x) {
    const Autocast low(x.device().type(), torch::kBFloat16);
    return second->forward(first->forward(x).relu_()).to(torch::kFloat) + x;
  };
}

inline Layer channel_dropout(Build& b) {
  const auto conv = b.conv(b.width, b.width, 3);
  const auto drop = b.add(nn::Dropout2d(0.3));
  return [=](const Tensor& x) { return drop->forward(torch::elu(conv->forward(x))); };
}

// Each row of a picture as a sequence of its points.
inline Layer picture_attention(Build& b) {
  const Layer inner = b.maybe() ? attention_by_hand(b) : fused_attention(b);
  return [=](const Tensor& x) {
    const Tensor rows = x.permute({0, 2, 3, 1});
    return inner(rows.flatten(0, 1)).view_as(rows).permute({0, 3, 1, 2});
  };
}

}  // namespace snug::testing::blocks
