//! The code of each target, which tries one input.

pub mod crypt_block;
pub mod header;
#[cfg(feature = "fuzzing")]
pub mod http_reply;
pub mod index;
pub mod names;
pub mod plan;
#[cfg(feature = "peers")]
pub mod safetensors_file;
#[cfg(feature = "peers")]
pub mod safetensors_header;
pub mod shards;
pub mod tensors_file;
pub mod torch_zip;

/// A target by its name.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const ALL: &[Target] = &[
    ("names", names::run),
    ("index", index::run),
    ("header", header::run),
    ("crypt_block", crypt_block::run),
    #[cfg(feature = "peers")]
    ("safetensors_header", safetensors_header::run),
    #[cfg(feature = "peers")]
    ("safetensors_file", safetensors_file::run),
    ("tensors_file", tensors_file::run),
    ("torch_zip", torch_zip::run),
    ("shards", shards::run),
    ("plan", plan::run),
    #[cfg(feature = "fuzzing")]
    ("http_reply", http_reply::run),
];
