//! Says how `libtensorizer_torch.so` is linked.

fn main() {
    // As seen from tensorizer/lib; torch/ is installed next to tensorizer/.
    println!("cargo::rustc-link-arg=-Wl,-rpath,$ORIGIN/../../torch/lib");
    println!("cargo::rustc-link-arg=-Wl,-soname,libtensorizer_torch.so");
    // Other Rust libraries of a process have symbols of the same names, such as those of `cxx`: none
    // of this library's crates are exported, and its calls reach its own functions.
    println!("cargo::rustc-link-arg=-Wl,--exclude-libs,ALL,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
