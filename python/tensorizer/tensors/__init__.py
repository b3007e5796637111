"""Tensors of torch in native code, and the devices that they are on."""
