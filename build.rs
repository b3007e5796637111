//! Says in one sentence where this does not compile, before the compiler says it in hundreds.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of_target = |what: &str| env::var(what).unwrap_or(String::new());
    let system = (of_target("CARGO_CFG_TARGET_OS"), of_target("CARGO_CFG_TARGET_ENV"));
    if system != ("linux".to_owned(), "gnu".to_owned()) {
        println!(
            "cargo::error=tensorizer needs Linux with glibc, found {}: macOS, Windows and musl \
             lack system calls that it is made of",
            of_target("TARGET")
        );
    }
}
