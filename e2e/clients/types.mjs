// Compares objects of the cluster with the TypeScript types of @kubevirt-ui/kubevirt-api.
//
// usage: node types.mjs NAMESPACE DIFFERENCES
//
// The objects of types.yaml are in NAMESPACE. Each object becomes a literal of its type in types/live.ts, which the compiler of
// TypeScript checks: it reports fields that the type does not have, that have another type, and that are missing. DIFFERENCES
// lists what the types lack, with the reason. Anything else fails.

import { execFileSync } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { resolve } from 'node:path';
import ts from 'typescript';

const [namespace, differencesFile] = process.argv.slice(2);
if (!differencesFile) {
  console.error('usage: node types.mjs NAMESPACE DIFFERENCES');
  process.exit(2);
}
const PACKAGE = '@kubevirt-ui/kubevirt-api/kubevirt/models';
const FILE = resolve('types/live.ts');

const kubevirt = `/apis/kubevirt.io/v1/namespaces/${namespace}`;
const instancetype = `/apis/instancetype.kubevirt.io/v1beta1/namespaces/${namespace}`;
const subresources = `/apis/subresources.kubevirt.io/v1`;
const SOURCES = [
  ['V1VirtualMachine', `${kubevirt}/virtualmachines/typed`],
  ['V1VirtualMachine', `${subresources}/namespaces/${namespace}/virtualmachines/typed/expand-spec`],
  ['V1VirtualMachineList', `${kubevirt}/virtualmachines`],
  ['V1VirtualMachineInstance', `${kubevirt}/virtualmachineinstances/typed`],
  ['V1VirtualMachineInstanceList', `${kubevirt}/virtualmachineinstances`],
  ['V1VirtualMachineInstanceMigration', `${kubevirt}/virtualmachineinstancemigrations/typed`],
  ['V1VirtualMachineInstanceReplicaSet', `${kubevirt}/virtualmachineinstancereplicasets/typed`],
  ['V1VirtualMachineInstancePreset', `${kubevirt}/virtualmachineinstancepresets/typed`],
  ['V1beta1VirtualMachineInstancetype', `${instancetype}/virtualmachineinstancetypes/typed`],
  ['V1beta1VirtualMachinePreference', `${instancetype}/virtualmachinepreferences/typed`],
  ['V1alpha1MigrationPolicy', '/apis/migrations.kubevirt.io/v1alpha1/migrationpolicies/e2e-clients-typed'],
  ['V1KubeVirtList', '/apis/kubevirt.io/v1/kubevirts'],
  ['K8sIoApimachineryPkgApisMetaV1APIResourceList', subresources],
];

// Returns the listed differences: a map from `unknown|mistyped|missing TYPE.FIELD` to the reason.
function listed() {
  const found = new Map();
  for (const line of readFileSync(differencesFile, 'utf8').split('\n')) {
    if (!line.trim() || line.startsWith('#')) continue;
    const [, key, reason] = /^((?:unknown|mistyped|missing) \w+\.\S+): (.+)$/.exec(line) ?? [];
    if (!key) throw new Error(`${differencesFile}: not a difference: ${line}`);
    found.set(key, reason);
  }
  return found;
}

// Returns a literal. `edits` maps paths to changes: { drop }, { any }, { add: names } or { rename: name }.
function literal(value, path, edits, indent) {
  const edit = edits.get(path) ?? {};
  const text = plain(value, path, edits, indent, edit.add ?? []);
  return edit.any ? `(${text} as any)` : text;
}

function plain(value, path, edits, indent, added) {
  const inner = `${indent}  `;
  if (Array.isArray(value)) {
    if (!value.length) return '[]';
    const items = value.map((item, index) => `${inner}${literal(item, `${path}/${index}`, edits, inner)},\n`);
    return `[\n${items.join('')}${indent}]`;
  }
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  const fields = Object.entries(value)
    .filter(([name]) => !edits.get(`${path}/${escape(name)}`)?.drop)
    .map(([name, item]) => {
      const at = `${path}/${escape(name)}`;
      return `${inner}${JSON.stringify(edits.get(at)?.rename ?? name)}: ${literal(item, at, edits, inner)},\n`;
    });
  const missing = added.map((name) => `${inner}${JSON.stringify(name)}: undefined as any,\n`);
  return fields.length + missing.length ? `{\n${fields.join('')}${missing.join('')}${indent}}` : '{}';
}

const escape = (name) => name.replaceAll('~', '~0').replaceAll('/', '~1');

function source(items, edits) {
  const names = [...new Set(items.map((item) => item.type))].join(', ');
  const constants = items.map((item, index) => `export const item${index}: ${item.type} = ${literal(item.value, String(index), edits, '')};\n`);
  return `// Objects of the cluster. Written by types.mjs.\nimport type { ${names} } from '${PACKAGE}';\n\n${constants.join('\n')}`;
}

// The generator of the types renames fields: reserved words get an underscore, and the first letter becomes lower case.
const spellings = (name) => [`_${name}`, name[0].toLowerCase() + name.slice(1)].filter((spelling) => spelling !== name);

// Paths of renamed fields, by those in the literal.
const renamed = new Map();

// Returns the path of a node in its object.
function pathOf(node) {
  if (ts.isVariableDeclaration(node)) return node.name.text.replace('item', '');
  if (ts.isPropertyAssignment(node)) {
    const path = `${pathOf(node.parent)}/${escape(node.name.text)}`;
    return renamed.get(path) ?? path;
  }
  if (node.parent && ts.isArrayLiteralExpression(node.parent)) {
    return `${pathOf(node.parent)}/${node.parent.elements.indexOf(node)}`;
  }
  return pathOf(node.parent);
}

function nodeAt(file, position) {
  const inside = (node) => ts.forEachChild(node, (child) => (child.getStart(file) <= position && position < child.end ? inside(child) ?? child : undefined));
  return inside(file);
}

const nameOf = (type) => (type.aliasSymbol ?? type.symbol)?.name ?? 'unknown';

// Returns the values of a type of an enumeration, or undefined for another type.
function enumeration(type) {
  const members = type.isUnion() ? type.types : [type];
  const values = members.filter((member) => !(member.flags & ts.TypeFlags.Undefined));
  return values.length && values.every((member) => member.flags & ts.TypeFlags.EnumLiteral) ? values.map((member) => member.value) : undefined;
}

// Returns what a diagnostic is about: the key of the difference, and the edit that hides it.
function explain(diagnostic, file, checker) {
  let node = nodeAt(file, diagnostic.start);
  while (!ts.isPropertyAssignment(node) && !ts.isVariableDeclaration(node) && !ts.isArrayLiteralExpression(node.parent)) node = node.parent;
  const value = node.initializer ?? node;
  const path = pathOf(node);
  const expected = checker.getContextualType(value);
  if (ts.isPropertyAssignment(node)) {
    const owner = checker.getContextualType(node.parent);
    const type = owner && checker.getNonNullableType(owner);
    if (type && !checker.getPropertyOfType(type, node.name.text) && !checker.getIndexInfosOfType(type).length) {
      const rename = spellings(node.name.text).find((spelling) => checker.getPropertyOfType(type, spelling));
      if (rename) {
        renamed.set(`${pathOf(node.parent)}/${rename}`, path);
        return { path, edit: { rename } };
      }
      return { key: `unknown ${nameOf(type)}.${node.name.text}`, path, edit: { drop: true } };
    }
  }
  const type = expected && checker.getNonNullableType(expected);
  if (type && ts.isObjectLiteralExpression(value)) {
    const known = new Set(value.properties.map((property) => property.name.text));
    const optional = (symbol) => symbol.flags & ts.SymbolFlags.Optional;
    const missing = checker.getPropertiesOfType(type).filter((symbol) => !optional(symbol) && !known.has(symbol.name));
    if (missing.length) return { key: `missing ${nameOf(type)}.${missing[0].name}`, path, edit: { add: [missing[0].name] } };
  }
  // A literal of JSON cannot name the member of an enumeration.
  const values = type && enumeration(type);
  if (values && ts.isStringLiteral(value) && values.includes(value.text)) return { path, edit: { any: true } };
  const owner = ts.isPropertyAssignment(node) && checker.getContextualType(node.parent);
  const holder = owner ? nameOf(checker.getNonNullableType(owner)) : 'item';
  return { key: `mistyped ${holder}.${path.split('/').at(-1)}`, path, edit: { any: true } };
}

function count(value) {
  if (value === null || typeof value !== 'object') return 1;
  return Object.values(value).reduce((sum, item) => sum + count(item), 0);
}

const items = SOURCES.map(([type, path]) => ({ type, path, value: JSON.parse(execFileSync('kubectl', ['get', '--raw', path], { encoding: 'utf8' })) }));
const differences = listed();
const options = {
  strict: true,
  noEmit: true,
  types: [],
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.ESNext,
  moduleResolution: ts.ModuleResolutionKind.Bundler,
};
mkdirSync('types', { recursive: true });
const edits = new Map();
const problems = new Map();
const met = new Set();
let program;
for (;;) {
  const text = source(items, edits);
  writeFileSync(FILE, text);
  program = ts.createProgram([FILE], options, undefined, program);
  const file = program.getSourceFile(FILE);
  const checker = program.getTypeChecker();
  const diagnostics = [...program.getSyntacticDiagnostics(file), ...program.getSemanticDiagnostics(file)];
  if (!diagnostics.length) break;
  let progress = false;
  for (const diagnostic of diagnostics) {
    const message = ts.flattenDiagnosticMessageText(diagnostic.messageText, '\n  ');
    if (diagnostic.code === 2307 || diagnostic.code === 2305) throw new Error(message);
    const { key, path, edit } = explain(diagnostic, file, checker);
    const former = edits.get(path) ?? {};
    const merged = { ...former, ...edit, add: [...(former.add ?? []), ...(edit.add ?? [])] };
    progress ||= JSON.stringify(former) !== JSON.stringify(merged);
    edits.set(path, merged);
    if (!key) continue;
    met.add(key);
    if (!differences.has(key)) {
      const [index, ...fields] = path.split('/');
      problems.set(key, `${items[index].path} .${fields.join('.')}\n  ${message}`);
    }
  }
  if (!progress) throw new Error(`cannot proceed: ${ts.formatDiagnostics(diagnostics, ts.createCompilerHost(options))}`);
}

// A listed field that the types have by now is not unknown.
const checker = program.getTypeChecker();
const models = program.getSourceFiles().find((file) => file.fileName.endsWith(`${PACKAGE}/index.ts`));
const exported = new Map(checker.getExportsOfModule(checker.getSymbolAtLocation(models)).map((symbol) => [symbol.name, symbol]));
for (const key of differences.keys()) {
  const [, kind, type, field] = /^(\w+) (\w+)\.(\S+)$/.exec(key);
  const symbol = exported.get(type);
  if (!symbol) problems.set(key, 'listed, but the package has no such type');
  else if (kind === 'unknown' && checker.getPropertyOfType(checker.getDeclaredTypeOfSymbol(symbol), field)) {
    problems.set(key, 'listed, but the type has this field');
  }
}
for (const { type, path, value } of items) console.log(`kubevirt-api: ${count(value)} values of ${path} as ${type}`);
if (problems.size) {
  console.error('FAILED: the types of @kubevirt-ui/kubevirt-api do not describe these fields:');
  for (const [key, where] of problems) console.error(`${key}: ${where}`);
  process.exit(1);
}
console.log(`kubevirt-api: the types describe all fields but ${met.size} that are listed: ${[...met].join(', ') || 'none'}`);
