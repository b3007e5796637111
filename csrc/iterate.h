// The operators that hand out tensors one by one.
#pragma once

#include "values.h"

namespace tensorizer {

// Begins to load the named tensors of a file, or all. Returns the iterator's number.
std::int64_t iterate(std::string uri, std::optional<Names> names, OptionalDevice device,
                     std::int64_t buffer_bytes, std::string order, bool verify, Readers num_readers,
                     Key key);

// Returns the next tensors by name: one, or several small ones; none at the end.
Dict iterate_next(std::int64_t iterator);

// Ends the load. Closing again does nothing.
void iterate_close(std::int64_t iterator);

}  // namespace tensorizer
