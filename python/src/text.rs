//! Text for messages and logs.

use pyo3::prelude::*;

/// Formats a number of bytes: `"123.5 MB"`, or `"117.8 MiB"` if not decimal.
#[pyfunction]
#[pyo3(signature = (num, decimal = true))]
pub fn convert_bytes(num: f64, decimal: bool) -> String {
    let (step, infix) = if decimal { (1000.0, "") } else { (1024.0, "i") };
    let mut value = num;
    for prefix in ["", "K", "M", "G", "T"] {
        if value.abs() < step {
            let unit =
                if prefix.is_empty() { "bytes".to_owned() } else { format!("{prefix}{infix}B") };
            return format!("{value:.1} {unit}");
        }
        value /= step;
    }
    format!("{value:.1} P{infix}B")
}
