// Errors cross the bridge between C++ and Rust as text, in both directions.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "rust/cxx.h"

namespace rust::behavior {

// C++ to Rust. cxx calls this for every function that is declared with `-> Result`. Errors of torch
// are passed on without their backtrace.
template <typename Try, typename Fail>
void trycatch(Try&& call, Fail&& fail) noexcept {
  try {
    call();
  } catch (const c10::Error& e) {
    fail(e.what_without_backtrace());
  } catch (const std::exception& e) {
    fail(e.what());
  } catch (...) {
    fail("an exception that is not a std::exception");
  }
}

}  // namespace rust::behavior

namespace tensorizer {

// Rust to C++: an error of the core becomes a c10::Error with the same text.
template <typename F>
auto checked(F&& call) -> decltype(call()) {
  try {
    return std::forward<F>(call)();
  } catch (const rust::Error& e) {
    TORCH_CHECK(false, e.what());
  }
}

}  // namespace tensorizer
