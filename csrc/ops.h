// The torch operators of this library.
#pragma once

#include "tensor.h"

namespace tensorizer {

// Defines the operators. Throws if this process has them already from another library.
void register_operators();

#ifdef TENSORIZER_TCH
// load.into for a list of tensors.
void load_into_list(rust::Str uri, rust::Slice<const rust::String> names, const TensorList& out);
#endif

}  // namespace tensorizer
