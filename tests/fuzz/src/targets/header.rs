//! Headers of tensors, with their hashes and blocks of encryption.
use crate::input::{Faults, Input, Out};
use crate::tensors;
use tensorizer::codec::crypt::EncryptedPieces;
use tensorizer::format::TensorKind;
use tensorizer::format::catalog::Entry;
use tensorizer::format::dtype::DType;
use tensorizer::format::name::Name;
use tensorizer::format::tensors::header::TensorHeader;

/// Tries an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let made = input.once_in(2);
    let file = tensors::file(&mut input);
    let Some(tensor) = file.tensors.first() else { return };
    let (Ok(name), Ok(dtype)) = (Name::parse(&tensor.name), DType::parse(tensor.dtype.as_bytes()))
    else {
        return;
    };
    let entry = Entry {
        name,
        kind: TensorKind::from_u8(tensor.kind).unwrap(),
        dtype,
        long: tensor.shape.iter().any(|&dim| dim > u64::from(u32::MAX)),
        shape: tensor.shape.clone().into(),
        file: 0,
        header_offset: 100,
        data_offset: 100 + tensor.header_len(file.encrypted) as u64,
        data_len: tensor.data.len() as u64,
        whole: None,
        strided: false,
    };
    TensorHeader::parse(
        &header(tensor, file.encrypted, &mut Input::new(&[])),
        &entry,
        file.encrypted,
    )
    .expect("nothing is wrong with it");
    let raw = if made { header(tensor, file.encrypted, &mut input) } else { input.rest().to_vec() };
    let Ok(header) = TensorHeader::parse(&raw, &entry, file.encrypted) else { return };
    let hashes: Vec<_> = header.hashes().collect();
    for (algorithm, at) in hashes {
        assert_eq!(header.raw[at].len(), algorithm.size());
    }
    assert!(header.covered().len() <= raw.len());
    let cipher = header.crypt_info.and_then(|info| info.cipher);
    if let Some(Ok(pieces)) = cipher.map(|cipher| EncryptedPieces::of(&cipher, entry.data_len)) {
        let mut at = 0;
        while at < entry.data_len {
            let (_, start, end) = pieces.piece(at);
            assert!(start == at && end > at && end <= entry.data_len);
            at = end;
        }
    }
}

fn header(tensor: &tensors::Made, encrypted: bool, input: &mut Input<'_>) -> Vec<u8> {
    let mut faults = Faults::new(input);
    let mut out = Out { bytes: Vec::new(), faults: &mut faults };
    tensor.body(encrypted, &mut out);
    out.bytes.truncate(tensor.header_len(encrypted));
    out.bytes
}
