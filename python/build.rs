//! Says where `_C.abi3.so` finds torch's libraries, which `tensorizer-torch` links.

fn main() {
    // As seen from tensorizer/, beside which torch/ is installed.
    println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/../torch/lib");
    println!("cargo:rerun-if-changed=build.rs");
}
