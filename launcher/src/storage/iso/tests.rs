//! Images read back field by field.

use super::*;

fn files(list: &[(&str, &[u8])]) -> Files {
    list.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())).collect()
}

/// Reads the Joliet tree back, independently of the writer's tables.
fn read_back(image: &[u8]) -> (String, Files) {
    let svd = &image[17 * SECTOR..18 * SECTOR];
    assert_eq!(&svd[..7], b"\x02CD001\x01");
    let wide = |bytes: &[u8]| {
        String::from_utf16(&bytes.chunks(2).map(|c| u16::from_be_bytes([c[0], c[1]])).collect::<Vec<_>>()).unwrap()
    };
    let mut found = Files::new();
    let extent = |record: &[u8]| {
        let le = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap()) as usize;
        (le(2) * SECTOR, le(10))
    };
    let mut queue = vec![(String::new(), extent(&svd[156..190]))];
    while let Some((prefix, (start, length))) = queue.pop() {
        let data = &image[start..start + length];
        let mut at = 0;
        while at < data.len() {
            let size = usize::from(data[at]);
            if size == 0 {
                at = (at + 1).next_multiple_of(SECTOR);
                continue;
            }
            let record = &data[at..at + size];
            let name = &record[33..33 + usize::from(record[32])];
            if name.len() > 1 {
                let (start, length) = extent(record);
                let path = format!("{prefix}{}", wide(name));
                if record[25] & 2 == 0 {
                    found.insert(path, image[start..start + length].to_vec());
                } else {
                    queue.push((format!("{path}/"), (start, length)));
                }
            }
            at += size;
        }
    }
    (wide(&svd[40..72]).trim().to_owned(), found)
}

#[test]
fn written_files_are_read_back() {
    let wanted = files(&[
        ("meta-data", b"{}"),
        ("user-data", &[b'x'; 5000]),
        ("empty", b""),
        ("openstack/latest/meta_data.json", b"{\"uuid\": 1}"),
        ("openstack/latest/user_data", b"#cloud-config"),
    ]);
    let image = build("cidata", &wanted).unwrap();
    assert_eq!(image.len() % BLOCK, 0);
    assert!(image.len() > 64 * 1024, "guests take a smaller disk for a broken one");
    assert_eq!(&image[16 * SECTOR + 40..16 * SECTOR + 46], b"cidata");
    let (label, found) = read_back(&image);
    assert_eq!(label, "cidata");
    assert_eq!(found, wanted);
}

#[test]
fn images_are_whole_blocks() {
    for sectors in 0..4 {
        let content = vec![b'x'; sectors * SECTOR];
        let image = build("cidata", &files(&[("user-data", &content)])).unwrap();
        assert_eq!(image.len() % BLOCK, 0, "{sectors}");
        let recorded = &image[16 * SECTOR + 80..16 * SECTOR + 84];
        assert_eq!(u32::from_le_bytes(recorded.try_into().unwrap()) as usize * SECTOR, image.len());
    }
}

#[test]
fn many_entries_fill_several_sectors() {
    let wanted: Files = (0..300).map(|i| (format!("a-rather-long-name-of-a-key-{i}"), vec![1; i])).collect();
    assert_eq!(read_back(&build("cfgdata", &wanted).unwrap()).1, wanted);
}

#[test]
fn names_that_do_not_fit_are_refused() {
    for name in ["", "/a", "a//b", "../a", "a/../b", "a/b/c/d/e/f/g/h"] {
        assert!(build("cidata", &files(&[(name, b"")])).is_err(), "{name}");
    }
}

#[test]
fn long_names_are_shortened_and_stay_unlike_others() {
    let long = |letter: &str, end: &str| format!("{}{end}", letter.repeat(200));
    let short = |letter: &str, count: usize, end: &str| format!("{}{end}", letter.repeat(count));
    let rows = [
        (short("x", 103, ""), short("x", 103, "")),
        (long("k", ""), short("k", 101, "~1")),
        (long("k", "a.conf"), short("k", 96, "~1.conf")),
        (long("k", "b.conf"), short("k", 96, "~2.conf")),
        (short("y", 101, "~1"), short("y", 101, "~1")),
        (short("y", 104, ""), short("y", 101, "~2")),
        (long("z", ".no-extension-but-the-end-of-a-name"), short("z", 101, "~1")),
        (long("d", "/key"), short("d", 101, "~1/key")),
        (short("\u{1f600}", 60, ""), short("\u{1f600}", 50, "~1")),
    ];
    let content = |name: &str| name.as_bytes().to_vec();
    let wanted: Files = rows.iter().map(|(name, _)| (name.clone(), content(name))).collect();
    let expected: Files = rows.iter().map(|(name, short)| (short.clone(), content(name))).collect();
    assert_eq!(read_back(&build("cfgdata", &wanted).unwrap()).1, expected);
}

#[test]
fn a_long_label_is_truncated_in_the_joliet_descriptor() {
    for (label, joliet) in [
        ("cfgdata", "cfgdata"),
        ("sixteen-letters-", "sixteen-letters-"),
        ("seventeen-letters", "seventeen-letter"),
        ("settings-of-the-billing-services", "settings-of-the-"),
    ] {
        let image = build(label, &Files::new()).unwrap();
        let primary = &image[16 * SECTOR + 40..16 * SECTOR + 72];
        assert_eq!(std::str::from_utf8(primary).unwrap().trim_end(), label);
        assert_eq!(&image[17 * SECTOR + 72..17 * SECTOR + 80], &[0_u8; 8], "what follows keeps its place");
        assert_eq!(read_back(&image).0, joliet);
    }
    for label in ["", "l\u{e9}", &"l".repeat(33)] {
        assert!(build(label, &Files::new()).is_err(), "{label}");
    }
}
