//! Says how `_C.abi3.so` is linked, and where it finds torch's libraries.

fn main() {
    // As seen from tensorizer/, beside which torch/ is installed.
    println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/../torch/lib");
    // None of its crates are exported, as in csrc/library/build.rs.
    println!("cargo:rustc-link-arg=-Wl,--exclude-libs,ALL,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}
