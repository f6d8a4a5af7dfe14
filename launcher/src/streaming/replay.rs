//! Earlier output of the serial console for a client that connects.

const ENQUIRY: u8 = 0x05;
const BELL: u8 = 0x07;
const ESCAPE: u8 = 0x1b;

/// Returns kept output without the sequences that a terminal answers, since the answers would be typed into the guest, and without
/// strings for the terminal itself, such as its title and its clipboard. With `is_cut` it begins with a whole line.
pub(super) fn replayable(kept: &[u8], is_cut: bool) -> Vec<u8> {
    let begin = kept.iter().position(|byte| *byte == b'\n').filter(|_| is_cut).map_or(0, |end| end + 1);
    let mut rest = kept.get(begin..).unwrap_or_default();
    let mut output = Vec::with_capacity(rest.len());
    while let Some((byte, after)) = rest.split_first() {
        let left_out = match *byte {
            ENQUIRY => 1,
            ESCAPE => left_out(after).map_or(0, |length| 1 + length),
            _ => 0,
        };
        if left_out == 0 {
            output.push(*byte);
        }
        rest = rest.get(left_out.max(1)..).unwrap_or_default();
    }
    output
}

/// Returns the length of the sequence after an escape character if it is left out.
fn left_out(sequence: &[u8]) -> Option<usize> {
    let (kind, rest) = sequence.split_first()?;
    match kind {
        b'Z' => Some(1),
        b'[' => {
            let end = rest.iter().position(|byte| !(0x20..0x40).contains(byte))?;
            let (parameters, last) = (rest.get(..end)?, rest.get(end)?);
            let is_request = match last {
                // Status, attributes, parameters, state of the window.
                b'n' | b'c' | b'x' | b't' => true,
                // Modes, version, keyboard.
                b'p' => parameters.ends_with(b"$"),
                b'q' => parameters.starts_with(b">"),
                b'u' => parameters.starts_with(b"?"),
                _ => false,
            };
            is_request.then_some(end + 2)
        }
        b']' | b'P' | b'X' | b'^' | b'_' => {
            let bell = rest.iter().position(|byte| *byte == BELL && *kind == b']').map(|at| at + 2);
            let terminator = rest.windows(2).position(|pair| pair == [ESCAPE, b'\\']).map(|at| at + 3);
            // Without an end the terminal would take all output for a part of the string.
            Some(bell.into_iter().chain(terminator).min().unwrap_or(1))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_to_the_terminal_are_left_out() {
        for (kept, expected) in [
            ("boot\r\nlogin: ", "boot\r\nlogin: "),
            (
                "\x1b[1;31mred\x1b[0m \x1b[2J\x1b[H\x1b[?1049h\x1b[>4;2m\x1b(B\x1b7",
                "\x1b[1;31mred\x1b[0m \x1b[2J\x1b[H\x1b[?1049h\x1b[>4;2m\x1b(B\x1b7",
            ),
            // Position of the cursor, as shells and resize programs request it.
            ("a\x1b[6nb\x1b[999;999H\x1b[6n", "ab\x1b[999;999H"),
            ("\x1b[c\x1b[>0c\x1b[=c\x1bZ\x05.", "."),
            ("\x1b[?2026$p\x1b[>q\x1b[?u\x1b[18tx", "x"),
            ("\x1b]11;?\x07\x1b]0;title\x1b\\\x1b]52;c;Zm9v\x07x", "x"),
            ("\x1bP+q544e\x1b\\\x1b_state\x1b\\x", "x"),
            ("\x1b]0;a\x07b\x1b]0;c\x1b\\d", "bd"),
            ("a\x1b]never ends", "anever ends"),
            ("a\x1b[6", "a\x1b[6"),
            ("a\x1b", "a\x1b"),
            ("ä\x1b[nö", "äö"),
        ] {
            assert_eq!(String::from_utf8(replayable(kept.as_bytes(), false)).unwrap(), expected, "{kept:?}");
        }
    }

    #[test]
    fn output_whose_begin_is_lost_begins_with_a_line() {
        for (kept, is_cut, expected) in [
            ("1mhalf\nwhole\n", true, "whole\n"),
            ("1mhalf\nwhole\n", false, "1mhalf\nwhole\n"),
            ("one", true, "one"),
            ("", true, ""),
        ] {
            assert_eq!(replayable(kept.as_bytes(), is_cut), expected.as_bytes(), "{kept:?} {is_cut}");
        }
    }
}
