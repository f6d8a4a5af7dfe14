//! Packs the files of npm packages that the web console serves into one archive. The packages contain several times as much.

use std::{env, fs, fs::File, io::Write, path::Path};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};

const PACKAGES: &str = "src/ui/packages";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={PACKAGES}");
    let output = Path::new(&env::var("OUT_DIR")?).join("packages.tar.gz");
    let mut packed = tar::Builder::new(GzEncoder::new(File::create(output)?, Compression::best()));
    for line in fs::read_to_string(Path::new(PACKAGES).join("packages.tsv"))?.lines().skip(1) {
        let columns = line.split('\t').collect::<Vec<_>>();
        let [package, version, .., files] = columns.as_slice() else { return Err(line.into()) };
        let name = package.rsplit('/').next().unwrap_or(package);
        let archive = File::open(Path::new(PACKAGES).join(format!("{name}-{version}.tgz")))?;
        for entry in tar::Archive::new(GzDecoder::new(archive)).entries()? {
            let entry = entry?;
            let path = entry.path()?.strip_prefix("package")?.to_str().ok_or("not UTF-8")?.to_owned();
            if files.split(' ').any(|file| path == file || (file.ends_with('/') && path.starts_with(file))) {
                let mut header = entry.header().clone();
                packed.append_data(&mut header, format!("{name}/{path}"), entry)?;
            }
        }
    }
    packed.into_inner()?.finish()?.flush()?;
    Ok(())
}
