# Turns the supported part of #cloud-config (YAML) into a shell script of calls to the functions in user-data.
# Supported: hostname, fqdn, password, chpasswd (list, users), runcmd, bootcmd, write_files.

# Splitting instead of gsub: awks disagree about backslashes in a replacement.
function quote(s,   n, i, parts, out) {
	n = split(s, parts, "'")
	out = parts[1]
	for (i = 2; i <= n; i++) out = out "'\\''" parts[i]
	return "'" out "'"
}

function strip(s) { sub(/^[ \t]+/, "", s); sub(/[ \t]+$/, "", s); return s }

# Value of a scalar: quotes removed, escapes of double quotes honoured, trailing comment of plain scalars dropped.
function scalar(s,   out, i, c, n) {
	s = strip(s)
	if (s ~ /^'/) {
		sub(/^'/, "", s); sub(/'[ \t]*(#.*)?$/, "", s); gsub(/''/, "'", s)
		return s
	}
	if (s ~ /^"/) {
		out = ""; n = length(s)
		for (i = 2; i <= n; i++) {
			c = substr(s, i, 1)
			if (c == "\"") break
			if (c == "\\") {
				i++; c = substr(s, i, 1)
				if (c == "n") c = "\n"; else if (c == "t") c = "\t"; else if (c == "r") c = "\r"; else if (c == "0") c = ""
			}
			out = out c
		}
		return out
	}
	sub(/[ \t]#.*$/, "", s)
	return strip(s)
}

# A flow sequence [a, "b c"] as a shell command line, each word quoted.
function words(s,   out, i, c, n, word, mark) {
	s = strip(s); sub(/^\[/, "", s); sub(/\][ \t]*(#.*)?$/, "", s)
	out = ""; word = ""; mark = ""; n = length(s)
	for (i = 1; i <= n + 1; i++) {
		c = i <= n ? substr(s, i, 1) : ","
		if (mark == "" && c == ",") {
			if (strip(word) != "") out = out (out == "" ? "" : " ") quote(scalar(word))
			word = ""
			continue
		}
		if (mark == "\"" && c == "\\") { word = word c; i++; c = substr(s, i, 1); word = word c; continue }
		if (mark == "" && (c == "\"" || c == "'") && strip(word) == "") mark = c
		else if (c == mark) mark = ""
		word = word c
	}
	return out
}

function indent_of(s) { match(s, /^ */); return RLENGTH }

# Reads the block scalar that starts after the current line; stops before the first line indented less than it.
function block(header, parent,   out, want, text, gap) {
	out = ""; want = -1; gap = ""
	while (at < count) {
		text = lines[at + 1]
		if (text ~ /^[ \t]*$/) { gap = gap "\n"; at++; continue }
		if (want < 0) { want = indent_of(text); if (want <= parent) break }
		if (indent_of(text) < want) break
		text = substr(text, want + 1)
		if (header ~ /^>/ && out != "" && gap == "") { sub(/\n$/, "", out); out = out " " text "\n" }
		else out = out gap text "\n"
		gap = ""
		at++
	}
	if (header ~ /-/) sub(/\n$/, "", out)
	return out
}

function value(s, parent) {
	s = strip(s)
	if (s ~ /^[|>][-+0-9]*[ \t]*(#.*)?$/) return block(s, parent)
	return scalar(s)
}

function report(what) { print "say " quote(what) }

function flush_file() {
	if (file["path"] != "")
		print "write_file " quote(file["path"]) " " quote(file["permissions"]) " " quote(file["owner"]) " " \
			quote(file["append"]) " " quote(file["encoding"]) " " quote(file["content"])
	split("", file)
}

function flush_user() {
	if (user["name"] != "" && user["password"] != "") print "set_password " quote(user["name"]) " " quote(user["password"])
	split("", user)
}

# NAME: VALUE inside a mapping; sets key and rest.
function pair(s,   colon) {
	colon = match(s, /:([ \t]|$)/)
	if (!colon) return 0
	key = strip(substr(s, 1, colon - 1)); gsub(/^["']|["']$/, "", key)
	rest = substr(s, colon + 1)
	return 1
}

function account_lines(text,   n, i, parts, list, colon) {
	n = split(text, list, "\n")
	for (i = 1; i <= n; i++) {
		colon = index(list[i], ":")
		if (colon > 1) print "set_password " quote(substr(list[i], 1, colon - 1)) " " quote(substr(list[i], colon + 1))
	}
}

function command(verb, s, depth,   text) {
	s = strip(s)
	if (s ~ /^\[/) {
		# A flow sequence may go on over several lines.
		while (s !~ /\][ \t]*(#.*)?$/ && at < count) { at++; s = s " " strip(lines[at]) }
		text = words(s)
	} else if (s ~ /^- /) {
		text = quote(scalar(substr(s, 3)))
		while (at < count && indent_of(lines[at + 1]) > depth && strip(lines[at + 1]) ~ /^- /) {
			at++; text = text " " quote(scalar(substr(strip(lines[at]), 3)))
		}
	} else text = value(s, depth)
	if (text != "") print verb " " quote(text)
}

function top(name, s) {
	s = strip(s)
	section = name
	if (name == "hostname" || name == "fqdn") { if (scalar(s) != "") print "set_hostname " quote(scalar(s)) }
	else if (name == "password") print "set_password root " quote(scalar(s))
	else if (name == "runcmd" || name == "bootcmd" || name == "write_files" || name == "chpasswd") {
		if (s != "" && s !~ /^#/ && !(name == "chpasswd" && s ~ /^\{ *"?expire"?: *[A-Za-z]+ *\}/))
			report(name ": this form is not supported")
	}
	else if (name == "user" || name == "ssh_pwauth" || name == "disable_root" || name == "manage_etc_hosts" ||
		name == "preserve_hostname" || name == "package_update" || name == "package_upgrade") report(name " has no effect here")
	else report(name " is not supported")
}

{ sub(/\r$/, ""); lines[++count] = $0 }

END {
	for (at = 1; at <= count; at++) {
		line = lines[at]
		if (line ~ /^[ \t]*(#.*)?$/ || line ~ /^---/) continue
		depth = indent_of(line)
		body = substr(line, depth + 1)
		if (depth == 0 && body !~ /^- /) {
			flush_file(); flush_user()
			if (pair(body)) top(key, rest)
			else { section = ""; report("line " at " is not understood") }
			continue
		}
		if (section == "runcmd" || section == "bootcmd") {
			if (body ~ /^-( |$)/) command(section == "runcmd" ? "run_command" : "boot_command", substr(body, 2), depth)
			else report("line " at " is not understood")
			continue
		}
		if (section == "write_files") {
			if (body ~ /^- /) { flush_file(); match(body, /^- */); depth += RLENGTH; body = substr(body, RLENGTH + 1) }
			if (pair(body)) {
				name = key; file[name] = value(rest, depth)
				if (name !~ /^(path|permissions|owner|append|encoding|content)$/) report("write_files: " name " has no effect here")
			} else report("line " at " is not understood")
			continue
		}
		if (section == "chpasswd") {
			if (body ~ /^- /) { flush_user(); match(body, /^- */); depth += RLENGTH; body = substr(body, RLENGTH + 1) }
			if (body ~ /^\{/) {
				sub(/^\{/, "", body); sub(/\}.*$/, "", body); n = split(body, parts, ",")
				for (i = 1; i <= n; i++) if (pair(strip(parts[i]))) user[key] = scalar(rest)
				continue
			}
			if (pair(body)) {
				name = key
				if (name == "list" && strip(rest) == "") {
					while (at < count && strip(lines[at + 1]) ~ /^- /) { at++; account_lines(scalar(substr(strip(lines[at]), 3))) }
				}
				else if (name == "list") account_lines(value(rest, depth))
				else if (name == "name" || name == "password") user[name] = value(rest, depth)
			}
			continue
		}
	}
	flush_file(); flush_user()
}
