// Carries the precompiled header of torch_pch.cmake; there is nothing here to compile.
