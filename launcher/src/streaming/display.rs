//! Screenshots of the display: converts QEMU's PNG or PPM to PNG.

use thiserror::Error;

/// Limit of width and height.
const SIDE_LIMIT: u32 = 16384;

/// Failure to convert a screenshot.
#[derive(Debug, Error)]
pub(crate) enum ScreenshotError {
    /// Neither PNG nor PPM with 8 bits a colour.
    #[error("QEMU returned a screenshot in an unknown format")]
    Format,
    /// Fewer pixels than the header says.
    #[error("the screenshot is truncated")]
    Short,
    /// The encoder failed.
    #[error("cannot encode the screenshot: {0}")]
    Encode(#[from] png::EncodingError),
}

/// Converts a screenshot of QEMU to PNG.
pub(crate) fn to_png(picture: Vec<u8>) -> Result<Vec<u8>, ScreenshotError> {
    if picture.starts_with(b"\x89PNG\r\n\x1a\n") {
        return Ok(picture);
    }
    let (width, height, start) = ppm_header(&picture).ok_or(ScreenshotError::Format)?;
    let size = usize::try_from(u64::from(width) * u64::from(height) * 3).map_err(|_| ScreenshotError::Format)?;
    let pixels = picture.get(start..start.saturating_add(size)).ok_or(ScreenshotError::Short)?;
    let mut out = Vec::new();
    let mut encoder = png::Encoder::new(&mut out, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(out)
}

/// Parses width, height and the start of the pixels of a binary PPM.
fn ppm_header(picture: &[u8]) -> Option<(u32, u32, usize)> {
    let mut at = picture.strip_prefix(b"P6").map(|_| 2)?;
    let mut numbers = [0u32; 3];
    for number in &mut numbers {
        while let Some(byte) = picture.get(at) {
            match byte {
                b'#' => at += picture.get(at..)?.iter().position(|b| *b == b'\n')?,
                b if b.is_ascii_whitespace() => at += 1,
                _ => break,
            }
        }
        let digits = picture.get(at..)?.iter().take(6).take_while(|b| b.is_ascii_digit()).count();
        *number = std::str::from_utf8(picture.get(at..at + digits)?).ok()?.parse().ok()?;
        at += digits;
    }
    let [width, height, depth] = numbers;
    let valid = depth == 255 && (1..=SIDE_LIMIT).contains(&width) && (1..=SIDE_LIMIT).contains(&height);
    (valid && picture.get(at)?.is_ascii_whitespace()).then_some((width, height, at + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ppm_becomes_a_png() {
        let mut ppm = b"P6\n# made by QEMU\n2 1\n255\n".to_vec();
        ppm.extend([255, 0, 0, 0, 0, 255]);
        let png = to_png(ppm).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; 6];
        reader.next_frame(&mut pixels).unwrap();
        assert_eq!(pixels, [255, 0, 0, 0, 0, 255]);
    }

    #[test]
    fn broken_pictures_are_refused() {
        for picture in [
            &b""[..],
            b"P6",
            b"P6 1 1 255",
            b"P6 1 1 65535\n",
            b"P6 99999 99999 255\n",
            b"P5 1 1 255\nxxx",
            b"P6 2 2 255\nxx",
        ] {
            assert!(to_png(picture.to_vec()).is_err(), "{picture:?}");
        }
    }

    #[test]
    fn a_png_is_passed_on() {
        let png = b"\x89PNG\r\n\x1a\nrest".to_vec();
        assert_eq!(to_png(png.clone()).unwrap(), png);
    }
}
