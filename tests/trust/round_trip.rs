//! Saves and loads a file, plain, mapped and encrypted: what memcheck watches.
#![allow(missing_docs)]

use std::sync::Arc;

use tensorizer::crypt::{DecryptionOptions, EncryptionOptions, Key, Secret};
use tensorizer::{
    LoadOptions, Never, Result, SaveOptions, SaveTensor, TensorFile, Verify, load, save,
};

fn main() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("round-trip-{}", std::process::id()));
    std::fs::create_dir_all(&folder)
        .map_err(|e| tensorizer::Error::InvalidArgument(e.to_string()))?;
    let path = folder.join("f.tensors");
    let done = round_trips(&path);
    drop(std::fs::remove_dir_all(folder));
    done.map(|count| println!("{count} round trips"))
}

fn round_trips(path: &std::path::Path) -> Result<usize> {
    let large: Vec<f32> = (0u16..60_000).map(f32::from).collect();
    let mut count = 0;
    for encrypted in [false, true] {
        let key = || Key::new(&[7; 32]);
        let encryption = EncryptionOptions { key: key()?, derivation: None, manifest: true };
        let options = SaveOptions {
            encryption: encrypted.then(|| Arc::new(encryption)),
            ..SaveOptions::default()
        };
        let tensors = vec![
            SaveTensor::new("large", &[60_000], &large)?,
            SaveTensor::new("small", &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?,
            SaveTensor::new("empty", &[0], &[0u8; 0])?,
        ];
        save(path, tensors, options, &Never)?;
        for map in [false, true] {
            let mut file = TensorFile::open(path)?;
            if encrypted {
                let options = DecryptionOptions::new(Secret::Key(key()?));
                file = file.decrypt(Arc::new(options), &Never)?;
            }
            let verify = if map { Verify::Nothing } else { Verify::All };
            let options = LoadOptions { readers: Some(2), verify, map, ..LoadOptions::default() };
            let loaded = load(&file, &[0, 1, 2], &options, &Never)?;
            let first = loaded.first().map(|first| first.as_slice::<f32>()).transpose()?;
            assert_eq!(first, Some(&large[..]));
            count += 1;
        }
    }
    Ok(count)
}
