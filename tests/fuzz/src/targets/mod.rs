//! What each target does with an input.

pub mod crypt_block;
pub mod header;
#[cfg(feature = "http")]
pub mod http_reply;
pub mod index;
pub mod names;
pub mod plan;
pub mod safetensors_file;
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
    ("safetensors_header", safetensors_header::run),
    ("safetensors_file", safetensors_file::run),
    ("tensors_file", tensors_file::run),
    ("torch_zip", torch_zip::run),
    ("shards", shards::run),
    ("plan", plan::run),
    #[cfg(feature = "http")]
    ("http_reply", http_reply::run),
];
