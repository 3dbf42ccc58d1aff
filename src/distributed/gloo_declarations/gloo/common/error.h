#pragma once
// LibTorch's header includes error.h but needs no declaration; see context.h.
