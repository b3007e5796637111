//! Turns panics into errors: a panic that crosses the bridge to C++ would end the process.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tensorizer::error::{Error, Result};

/// Runs the body of a function that C++ calls; a panic becomes an error.
pub fn guard<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // A panic drops all values that the body has changed, so no inconsistent state remains visible.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Err(Error::Bug(format!("panic: {text}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error() {
        let result: Result<()> = guard(|| panic!("on {}", "purpose"));
        assert!(matches!(result, Err(Error::Bug(text)) if text.contains("on purpose")));
    }
}
