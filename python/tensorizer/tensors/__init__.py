"""The passing of torch's tensors to native code, and the devices that they are on."""
