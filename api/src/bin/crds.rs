//! Writes the custom resource definitions of the chart into a directory (`crds --output DIR`), or those of the importer to
//! standard output (`crds --importer`).

use std::{env, error::Error, ffi::OsString, fs, path::Path, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let result = match arguments.as_slice() {
        [flag, directory] if flag == "--output" => write(Path::new(directory)),
        [flag] if flag == "--importer" => print_importer(),
        _ => {
            eprintln!("usage: crds --output DIR | --importer");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("crds: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(directory)?;
    for crd in api::crds::all()? {
        let path = directory.join(api::crds::file_name(&crd));
        fs::write(&path, api::crds::yaml(&crd)?)?;
        println!("{}", path.display());
    }
    Ok(())
}

fn print_importer() -> Result<(), Box<dyn Error>> {
    for crd in api::crds::importer()? {
        print!("---\n{}", api::crds::yaml(&crd)?);
    }
    Ok(())
}
