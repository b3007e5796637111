// The torch operators of this library.
#pragma once

namespace tensorizer {

// Defines the operators. Throws if this process has them already from another library.
void register_operators();

}  // namespace tensorizer
