"""Triton kernels and their launchers; nothing here is imported before a kernel is launched."""
