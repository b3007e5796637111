//! Safetensors files: written as a whole, because that format has its header first.

use std::io::IoSlice;

use super::save::Writer;
use super::save_options::SaveTensor;
use crate::cancel::Cancel;
use crate::engine::write::{TensorData, WriteOptions, WriteTensor, write_tensors};
use crate::error::{Error, Result};
use crate::format::safetensors::{SafetensorsLayout, SafetensorsTensor};
use crate::io::{Reservation, write_all_at};

impl Writer {
    /// Writes all tensors of a safetensors file. Nothing may have been written before, and nothing
    /// can be written after.
    pub fn write_safetensors(
        &mut self,
        tensors: Vec<SaveTensor<'_>>,
        cancel: &dyn Cancel,
    ) -> Result<()> {
        self.check_usable()?;
        if self.other_format || !self.entries.is_empty() {
            let what = format!(
                "`{}` has tensors already: all tensors of a safetensors file go into one call",
                self.uri()
            );
            return Err(Error::InvalidArgument(what));
        }
        if self.options.encryption.is_some() {
            let what = "safetensors files cannot be encrypted: write a .tensors file".to_owned();
            return Err(Error::InvalidArgument(what));
        }
        tensors.iter().try_for_each(|tensor| tensor.check(self.uri()))?;
        let placed = tensors.iter().map(|tensor| {
            if matches!(tensor.data, TensorData::Meta) {
                let what =
                    format!("tensor `{}` is on the meta device, and has no data", tensor.name);
                return Err(Error::InvalidArgument(what));
            }
            let (name, dtype) = (tensor.name.clone(), tensor.dtype);
            Ok(SafetensorsTensor { name, dtype, shape: tensor.shape.clone() })
        });
        let placed = placed.collect::<Result<Vec<_>>>()?;
        let metadata = self.options.metadata.as_deref();
        let layout = SafetensorsLayout::new(placed, metadata, self.base)?;
        self.failed = true;
        self.other_format = true;
        self.end = layout.end;
        let mut sources = tensors.into_iter().map(|tensor| Some(tensor.data)).collect::<Vec<_>>();
        let items = layout.entries.iter().zip(&layout.order).map(|(entry, &number)| {
            let data = sources.get_mut(number).and_then(Option::take);
            let data = data.ok_or_else(|| Error::Bug(format!("no tensor {number}")))?;
            Ok(WriteTensor { entry, module_index: 0, data })
        });
        let items = items.collect::<Result<Vec<_>>>()?;
        let (threads, memory) = (self.options.threads, self.options.memory);
        let options = WriteOptions { threads, memory, ..WriteOptions::default() };
        let sink = self.sink()?;
        let head = self.base.saturating_add(layout.head.len() as u64);
        sink.reserve(&Reservation { head, len: layout.end, parts: None })?;
        write_all_at(sink, self.base, &mut [IoSlice::new(&layout.head)], cancel)?;
        write_tensors(sink, &items, &options, &self.progress, cancel)?;
        self.tensor_bytes = layout.end.saturating_sub(head);
        self.failed = false;
        Ok(())
    }
}
