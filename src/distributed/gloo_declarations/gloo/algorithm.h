#pragma once
// LibTorch's header includes algorithm.h but needs no declaration; see context.h.
