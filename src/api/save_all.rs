//! Saves in one call.

use super::save::Writer;
use super::save_options::{SaveOptions, SaveTensor};
use crate::cancel::Cancel;
use crate::error::Result;
use crate::io::WriteAt;

/// Saves tensors to a local path: all of them or, on any error, none.
pub fn save(
    path: &std::path::Path,
    tensors: Vec<SaveTensor<'_>>,
    options: SaveOptions,
    cancel: &dyn Cancel,
) -> Result<()> {
    save_to(Box::new(crate::io::uri::create_file(path)?), tensors, options, cancel)
}

/// Does the same for any sink.
pub fn save_to(
    sink: Box<dyn WriteAt>,
    tensors: Vec<SaveTensor<'_>>,
    options: SaveOptions,
    cancel: &dyn Cancel,
) -> Result<()> {
    let options = SaveOptions { room_for_more: false, ..options };
    let mut writer = Writer::new(sink, 0, options)?;
    writer.write(tensors, cancel)?;
    writer.finish(cancel)
}
