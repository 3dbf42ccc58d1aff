"""Calls of operators, as (name or name.overload, arguments, keywords), that PyTorch's own lists for autocast lack: the rest of what CPU
autocast has a kernel for, of what snug's fp32_reductions adds to that, and some that both leave alone.
"""

import torch


def random(dtype, *shape):
    return torch.rand(shape).to(dtype)


def left_alone(dtype):
    """What CPU autocast leaves in the type of its input, and what is made of operators that it does not."""
    low, row = random(dtype, 4, 4), torch.rand(4)
    image = random(dtype, 2, 4, 8, 8)
    yield from ((name, (low,), {}) for name in ("exp", "log", "sum", "mean", "norm", "gelu", "relu", "abs", "sigmoid", "tanh"))
    yield from ((name, (low, 1), {}) for name in ("softmax", "log_softmax", "sum", "cumsum", "mean"))
    yield "logsumexp", (low, [1]), {}
    yield "layer_norm", (low, [4]), {}
    yield "layer_norm", (low, [4], row, row), {}
    yield "rms_norm", (low, [4]), {}
    yield "group_norm", (image, 2), {}
    yield "batch_norm", (image, None, None, None, None, True, 0.1, 1e-5, False), {}
    yield "einsum", ("ij,jk->ik", [torch.rand(4, 4), torch.rand(4, 4)]), {}


def products(dtype):
    """What CPU autocast runs in 16 bits."""
    full, heads = torch.rand(4, 4), torch.rand(2, 2, 4, 8)
    yield "linalg_vecdot", (full, full), {}
    yield "scaled_dot_product_attention", (heads, heads, heads), {}
    yield "_convolution.deprecated", (torch.rand(1, 2, 8, 8), torch.rand(2, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
                                      False, False, False), {}
    for n in (1, 2, 3):
        yield f"conv{n}d.padding", (torch.rand(1, 2, *[8] * n), torch.rand(2, 2, *[3] * n), None, [1] * n, "same"), {}
    # Gates of an LSTM: 4 x 3 rows.
    gates, state = torch.rand(12, 3), torch.zeros(1, 2, 3)
    yield "mkldnn_rnn_layer", (torch.rand(5, 2, 3), gates, gates, torch.rand(12), torch.rand(12), state, state, False, [], 2, 3, 1, True,
                               False, False, False), {}
    yield "_native_multi_head_attention", (torch.rand(2, 4, 8), torch.rand(2, 4, 8), torch.rand(2, 4, 8), 8, 2, torch.rand(24, 8),
                                           torch.rand(24), torch.rand(8, 8), torch.rand(8)), {}


def promoted(dtype):
    full = torch.rand(4, 4)
    yield "index_copy", (full, 0, torch.tensor([1]), full[:1].to(dtype)), {}


def losses(dtype):
    low, classes = random(dtype, 4, 4), torch.arange(4)
    yield "cross_entropy_loss", (low, classes), {}
    yield "kl_div", (low, low), {}
    yield "huber_loss", (low, low), {}
    yield "multilabel_margin_loss_forward", (low, classes.repeat(4, 1), 1), {}
    odds, targets, lengths = torch.rand(8, 1, 4).log_softmax(2).to(dtype), torch.ones(1, 2, dtype=torch.long), torch.tensor([8])
    yield "ctc_loss.IntList", (odds, targets, [8], [2]), {}
    yield "ctc_loss.Tensor", (odds, targets, lengths, torch.tensor([2])), {}


def signals(dtype):
    """Pictures, sound and what surrounds them."""
    line, image, volume = random(dtype, 2, 4, 8), random(dtype, 2, 4, 8, 8), random(dtype, 2, 4, 8, 8, 8)
    grid, grid3 = random(dtype, 2, 4, 4, 2), random(dtype, 2, 4, 4, 4, 3)
    yield "grid_sampler", (image, grid, 0, 0, False), {}
    yield "grid_sampler_2d", (image, grid, 0, 0, False), {}
    yield "_grid_sampler_2d_cpu_fallback", (image, grid, 0, 0, False), {}
    yield "grid_sampler_3d", (volume, grid3, 0, 0, False), {}
    yield "reflection_pad1d", (line, [1, 1]), {}
    yield "replication_pad1d", (line, [1, 1]), {}
    yield "reflection_pad2d", (image, [1, 1, 1, 1]), {}
    yield "replication_pad2d", (image, [1, 1, 1, 1]), {}
    yield "replication_pad3d", (volume, [1, 1, 1, 1, 1, 1]), {}
    yield "max_pool3d", (volume, [2, 2, 2]), {}
    yield "adaptive_avg_pool3d", (volume, [2, 2, 2]), {}
    yield "adaptive_max_pool3d", (volume, [2, 2, 2]), {}
    yield "fractional_max_pool2d", (image, [2, 2], [4, 4], random(dtype, 2, 4, 2)), {}
    yield "fractional_max_pool3d", (volume, [2, 2, 2], [4, 4, 4], random(dtype, 2, 4, 3)), {}
    corner = torch.zeros(2, 4, 2, 2, dtype=torch.long)
    yield "max_unpool2d", (image[:, :, :2, :2], corner, [4, 4]), {}
    corner3 = corner[..., None].expand(2, 4, 2, 2, 2).contiguous()
    yield "max_unpool3d", (volume[:, :, :2, :2, :2], corner3, [4, 4, 4], [2, 2, 2], [0, 0, 0]), {}
    sound, window = random(dtype, 64), torch.ones(16, dtype=dtype)
    yield "stft", (sound, 16), {"return_complex": True, "window": window}
    yield "stft.center", (sound, 16), {"return_complex": True, "window": window}
    yield from ((f"fft_{name}", (random(dtype, 4, 4),), {})
                for name in ("fft", "rfft", "ifft", "ihfft", "fft2", "rfft2", "ifft2", "fftn", "rfftn", "ifftn"))
    yield from ((f"fft_{name}", (torch.rand(4, 4, dtype=torch.complex64),), {}) for name in ("hfft", "irfft", "irfft2", "irfftn"))
    yield "view_as_complex", (random(dtype, 4, 2),), {}
    yield "polar", (random(dtype, 4), random(dtype, 4)), {}


def matrices(dtype):
    """Linear algebra and statistics."""
    low, column = random(dtype, 4, 4), random(dtype, 4, 1)
    square = (random(torch.float32, 4, 4) + 4 * torch.eye(4)).to(dtype)
    symmetric = (square.float() @ square.float().T).to(dtype)
    tensor = torch.eye(4).reshape(2, 2, 2, 2).to(dtype)
    pivots = torch.arange(1, 5, dtype=torch.int32)
    yield from ((name, (square,), {}) for name in (
        "linalg_inv", "linalg_inv_ex", "linalg_det", "linalg_qr", "linalg_svdvals", "linalg_svd", "linalg_cond", "linalg_eig",
        "linalg_eigvals", "inverse", "pinverse", "geqrf", "qr", "svd", "trace"))
    yield from ((name, (symmetric,), {}) for name in (
        "linalg_cholesky", "linalg_cholesky_ex", "linalg_eigvalsh", "linalg_eigh", "cholesky", "cholesky_inverse"))
    yield "cholesky_solve", (column, symmetric), {}
    yield "linalg_cond.p_str", (square, "fro"), {}
    yield "linalg_householder_product", (low, random(dtype, 4)), {}
    yield "orgqr", (low, random(dtype, 4)), {}
    yield "ormqr", (low, random(dtype, 4), low), {}
    yield "linalg_lstsq", (square, low), {}
    yield "linalg_solve", (square, low), {}
    yield "linalg_matrix_rank", (square, 0.1), {}
    yield "linalg_matrix_rank.atol_rtol_float", (square,), {"atol": 0.1, "rtol": 0.1}
    yield "linalg_matrix_rank.atol_rtol_tensor", (square,), {"atol": torch.tensor(0.1), "rtol": torch.tensor(0.1)}
    yield "linalg_matrix_rank.tol_tensor", (square, torch.tensor(0.1)), {}
    yield "linalg_tensorinv", (tensor, 2), {}
    yield "linalg_tensorsolve", (tensor, random(dtype, 2, 2)), {}
    yield "lu_solve", (column, square, pivots), {}
    yield "triangular_solve", (column, square), {}
    yield "_lu_with_info", (square,), {}
    yield "cdist", (low, low), {}
    yield "prod", (low,), {}
    yield "prod", (low, 1), {}
    for name in ("quantile", "nanquantile"):
        yield name, (low, torch.tensor([0.5]).to(dtype)), {}
        yield f"{name}.scalar", (low, 0.5), {}
    yield "fake_quantize_per_tensor_affine", (low, 0.1, 0, 0, 255), {}


def reductions(dtype):
    """What fp32_reductions is to run in FP32, as far as PyTorch's lists for CUDA lack it."""
    low, row = random(dtype, 4, 4), random(dtype, 4)
    line, image, volume = random(dtype, 2, 4, 8), random(dtype, 2, 4, 8, 8), random(dtype, 2, 4, 8, 8, 8)
    yield "mean", (low,), {}
    yield "mean", (low, [1]), {}
    yield "pow.Scalar", (2.0, low), {}
    yield "huber_loss", (low, low), {}
    yield "batch_norm", (image, None, None, None, None, True, 0.1, 1e-5, False), {}
    yield "native_layer_norm", (low, [4], row, row, 1e-5), {}
    yield "frobenius_norm.dim", (low, [1]), {}
    yield "nuclear_norm", (low,), {}
    yield "nuclear_norm.dim", (low, [0, 1]), {}
    yield "linalg_vector_norm", (low,), {}
    yield "linalg_matrix_norm", (low, 2), {}
    yield "linalg_matrix_norm.str_ord", (low,), {}
    for inputs, nearest, smooth in ((line, "nearest1d", ["upsample_linear1d"]),
                                    (image, "nearest2d", ["upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d",
                                                          "_upsample_bicubic2d_aa"]),
                                    (volume, "nearest3d", ["upsample_trilinear3d"])):
        size = [16] * (inputs.dim() - 2)
        yield f"upsample_{nearest}", (inputs, size), {}
        yield f"_upsample_{nearest.replace('nearest', 'nearest_exact')}", (inputs, size), {}
        yield from ((name, (inputs, size, False), {}) for name in smooth)


def more_operators(dtype):
    for part in (left_alone, products, promoted, losses, signals, matrices):
        yield from part(dtype)
