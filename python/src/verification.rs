//! Python's names for the hashes that a load compares.

use tensorizer::Verify;

/// Returns the option for a name; unknown names compare all hashes.
pub fn verification(name: &str) -> Verify {
    match name {
        "nothing" => Verify::Nothing,
        "crc32" => Verify::Crc32,
        _ => Verify::All,
    }
}
