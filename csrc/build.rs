//! Compiles the C++ here against the torch that the environment has, and links to it.
//!
//! torch is found through `TENSORIZER_TORCH` (the folder that holds `lib` and `include`), else by
//! asking Python where its `torch` package is, without importing it.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    if let Err(sentence) = build() {
        println!("cargo::error={sentence}");
    }
}

const BRIDGES: &[&str] = &["torch.rs", "bridge.rs"];
const SOURCES: &[&str] = &["blocks.cpp", "ops.cpp", "tensor.cpp", "values.cpp"];
const HEADERS: &[&str] = &["blocks.h", "errors.h", "ops.h", "tensor.h", "values.h"];

/// The torch minors that the sources build on. `setup.py` reads this line.
const SUPPORTED: std::ops::RangeInclusive<u32> = 10..=15;

fn build() -> Result<(), String> {
    for source in SOURCES.iter().chain(HEADERS).chain(BRIDGES).chain(&["build.rs"]) {
        println!("cargo:rerun-if-changed={source}");
    }
    println!("cargo:rerun-if-env-changed=TENSORIZER_TORCH");
    println!("cargo:rerun-if-env-changed=VIRTUAL_ENV");
    let root = find()?;
    let version = version(&root)?;
    let (major, minor) = major_and_minor(&version)
        .ok_or_else(|| format!("cannot read the torch version {version:?}"))?;
    if major != 2 || !SUPPORTED.contains(&minor) {
        return Err(format!(
            "tensorizer builds on torch 2.{} to 2.{}, found {version} in {}",
            SUPPORTED.start(),
            SUPPORTED.end(),
            root.display()
        ));
    }
    println!("cargo:rustc-env=TENSORIZER_TORCH_VERSION={major}.{minor}");
    let lib = root.join("lib");
    let include = root.join("include");
    let mut build = cxx_build::bridges(BRIDGES);
    build
        .files(SOURCES)
        .std("c++20")
        .include(".")
        .flag("-isystem")
        .flag(include.display().to_string())
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include").display().to_string())
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .flag("-Wall")
        .flag("-Wextra")
        .flag("-Wno-unused-parameter")
        // A false alarm of GCC 12 inside torch's own headers.
        .flag_if_supported("-Wno-stringop-overflow")
        // The same for every profile, so that all profiles share the compiled library.
        .opt_level(2)
        .debug(false);
    if cfg!(feature = "tch") {
        build.define("TENSORIZER_TCH", None);
    }
    compile_once(&build, &version)?;
    // Never torch_cuda or torch_python: one library serves CPU and CUDA builds of torch.
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=dylib=torch_cpu");
    println!("cargo:rustc-link-lib=dylib=c10");
    Ok(())
}

/// Compiles the C++, unless an earlier run of this script has compiled the same sources with the
/// same flags. Cargo runs it once for each profile and kind of check, and the headers of torch take
/// most of a minute.
fn compile_once(build: &cc::Build, version: &str) -> Result<(), String> {
    const NAME: &str = "tensorizer_csrc";
    let out = PathBuf::from(
        env::var_os("OUT_DIR")
            .ok_or("the environment variable OUT_DIR is not set: run this script through cargo")?,
    );
    let library = format!("lib{NAME}.a");
    let key = key(build, &out, version).map_err(|e| format!("csrc/ cannot be read: {e}"))?;
    // The profile's folder, three levels up, is shared by all runs of this script.
    let cached = out.ancestors().nth(3).unwrap_or(&out).join("csrc").join(format!("{key:016x}"));
    if fs::copy(cached.join(&library), out.join(&library)).is_ok() {
        println!("cargo::rustc-link-search=native={}", out.display());
        println!("cargo::rustc-link-lib=static={NAME}");
        println!("cargo::rustc-link-lib=dylib=stdc++");
        return Ok(());
    }
    build.try_compile(NAME).map_err(|e| {
        let why = e.to_string().replace('\n', " ");
        format!("csrc/ does not compile against torch {version}: {why}")
    })?;
    // Renamed when complete, so that its name never shows a partial file. If saving fails, the next
    // run compiles again.
    let part = cached.with_extension(std::process::id().to_string());
    let saved = fs::create_dir_all(&cached)
        .and_then(|()| fs::copy(out.join(&library), &part))
        .and_then(|_| fs::rename(&part, cached.join(&library)));
    if let Err(error) = saved {
        println!(
            "cargo::warning=cannot keep the compiled library in {}, so the next build compiles it \
             again: {error}",
            cached.display()
        );
    }
    Ok(())
}

/// Hashes everything that the library depends on: sources, compiler and flags, versions of torch
/// and `cxx`.
fn key(build: &cc::Build, out: &Path, version: &str) -> std::io::Result<u64> {
    let mut hasher = DefaultHasher::new();
    version.hash(&mut hasher);
    let out = out.display().to_string();
    let compiler = build.get_compiler();
    compiler.path().hash(&mut hasher);
    for flag in compiler.args() {
        flag.to_string_lossy().replace(&out, "").hash(&mut hasher);
    }
    // The code that `cxx` generates depends only on the bridges and on its version, which is in
    // Cargo.lock.
    fs::read("../Cargo.lock")?.hash(&mut hasher);
    for source in SOURCES.iter().chain(HEADERS).chain(BRIDGES) {
        fs::read(source)?.hash(&mut hasher);
    }
    Ok(hasher.finish())
}

fn find() -> Result<PathBuf, String> {
    if let Some(folder) = env::var_os("TENSORIZER_TORCH") {
        return Ok(PathBuf::from(folder));
    }
    let python = match env::var_os("VIRTUAL_ENV") {
        Some(venv) => Path::new(&venv).join("bin/python").into_os_string(),
        None => "python3".into(),
    };
    let script = "import importlib.util as u; s = u.find_spec('torch'); \
                  print(s.submodule_search_locations[0] if s else '')";
    let output = Command::new(&python).args(["-I", "-c", script]).output();
    let output =
        output.map_err(|e| format!("cannot run {} to find torch: {e}", python.display()))?;
    let found = String::from_utf8(output.stdout).unwrap_or(String::new());
    match found.trim() {
        "" => Err("torch was not found: install it first (pip install torch), or set \
                   TENSORIZER_TORCH to a libtorch folder"
            .to_owned()),
        path => Ok(PathBuf::from(path)),
    }
}

fn version(root: &Path) -> Result<String, String> {
    // The Python package has version.py, a libtorch archive build-version.
    let python = fs::read_to_string(root.join("version.py")).unwrap_or(String::new());
    let quoted = python.lines().find_map(|line| line.strip_prefix("__version__ = "));
    if let Some(version) = quoted {
        return Ok(version.trim_matches(['\'', '"']).to_owned());
    }
    fs::read_to_string(root.join("build-version")).map(|text| text.trim().to_owned()).map_err(|e| {
        format!(
            "{} is not a torch or libtorch folder: cannot read its build-version: {e}",
            root.display()
        )
    })
}

fn major_and_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(['.', '+', 'a', 'r', 'b']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
