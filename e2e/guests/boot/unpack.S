# The 32-bit part of a kernel that is packed with LZ4 instead of what its distribution chose. The kernel's own 16-bit
# part enters it at 0x100000 by the protocol of Documentation/arch/x86/boot.rst of Linux: flat segments, no paging,
# interrupts off, %esi at the boot parameters.
#
# What is packed begins behind this program. It is moved out of the way, the kernel's own arguments are put before those
# of the loader, the kernel is unpacked to where it was linked to run,
# and it is entered by the 64-bit protocol: long mode, and the first 4 GiB mapped to themselves.

	.set	TABLES, 0x200000	# six pages: behind the move only what was moved is here
	.set	ARGUMENTS, 0x210000	# likewise
	.set	CMD_LINE_PTR, 0x228	# in the boot parameters
	.set	PRESENT, 3		# and writable
	.set	LARGE, 0x83		# a page of 2 MiB

	.code32
	.text
	.globl	_start
_start:
	cld
	movl	%esi, %ebp
	movl	$packed, %esi
	movl	target, %edi
	movl	length, %ecx
	rep movsl

	movl	$own_arguments, %esi	# the kernel's arguments: first its own, then the loader's
	movl	$ARGUMENTS, %edi
1:	lodsb
	testb	%al, %al
	jz	2f
	stosb
	jmp	1b
2:	movl	CMD_LINE_PTR(%ebp), %esi
	movl	$ARGUMENTS, CMD_LINE_PTR(%ebp)
	testl	%esi, %esi
	jz	4f
	movl	$2048, %ecx		# as much as the kernel reads
3:	lodsb
	stosb
	testb	%al, %al
	loopnz	3b
4:	movb	$0, (%edi)

	movl	$TABLES, %edi
	xorl	%eax, %eax
	movl	$6 * 1024, %ecx
	rep stosl
	movl	$TABLES + 0x1000 + PRESENT, TABLES
	movl	$TABLES + 0x2000 + PRESENT, %eax
	movl	$TABLES + 0x1000, %edi
	movl	$4, %ecx
1:	movl	%eax, (%edi)
	addl	$0x1000, %eax
	addl	$8, %edi
	loop	1b
	movl	$LARGE, %eax
	movl	$TABLES + 0x2000, %edi
	movl	$4 * 512, %ecx
2:	movl	%eax, (%edi)
	addl	$0x200000, %eax
	addl	$8, %edi
	loop	2b

	lgdt	segments_pointer
	movl	$TABLES, %eax
	movl	%eax, %cr3
	movl	%cr4, %eax
	orl	$0x20, %eax		# entries of 8 bytes
	movl	%eax, %cr4
	movl	$0xc0000080, %ecx	# EFER
	rdmsr
	orl	$0x100, %eax		# long mode
	wrmsr
	movl	%cr0, %eax
	orl	$0x80000000, %eax	# paging
	movl	%eax, %cr0
	ljmp	$16, $unpack

	.balign	8
segments:
	.quad	0
	.quad	0
	.quad	0x00af9b000000ffff	# 16: code, 64 bits
	.quad	0x00cf93000000ffff	# 24: data
segments_end:
segments_pointer:
	.word	segments_end - segments - 1
	.long	segments

# Blocks, each with its length before it; one of no length is the end. A block consists of sequences: a byte with two
# lengths, literal bytes, the distance back to bytes that come again. The last sequence has literals only. Eight bytes are
# copied at a time, so that up to 15 too many are written, which the next sequence overwrites.
	.code64
unpack:
	movl	$24, %eax
	movl	%eax, %ds
	movl	%eax, %es
	movl	%eax, %ss
	movl	target(%rip), %esi
	movl	kernel(%rip), %edi
block:
	lodsl
	testl	%eax, %eax
	jz	done
	leaq	(%rsi, %rax), %rbx
sequence:
	movzbl	(%rsi), %edx
	incq	%rsi
	movl	%edx, %ecx
	shrl	$4, %ecx
	jz	match
	cmpl	$15, %ecx
	jne	2f
1:	movzbl	(%rsi), %eax
	incq	%rsi
	addl	%eax, %ecx
	cmpl	$255, %eax
	je	1b
2:	leaq	(%rsi, %rcx), %r8
	leaq	(%rdi, %rcx), %r9
3:	movq	(%rsi), %rax
	movq	%rax, (%rdi)
	addq	$8, %rsi
	addq	$8, %rdi
	cmpq	%r9, %rdi
	jb	3b
	movq	%r8, %rsi
	movq	%r9, %rdi
	cmpq	%rbx, %rsi
	jae	block
match:
	movzwl	(%rsi), %r8d
	addq	$2, %rsi
	andl	$15, %edx
	cmpl	$15, %edx
	jne	5f
4:	movzbl	(%rsi), %eax
	incq	%rsi
	addl	%eax, %edx
	cmpl	$255, %eax
	je	4b
5:	leaq	4(%rdi, %rdx), %r9
	movq	%rdi, %rcx
	subq	%r8, %rcx
	cmpl	$8, %r8d
	jb	7f
6:	movq	(%rcx), %rax
	movq	%rax, (%rdi)
	addq	$8, %rcx
	addq	$8, %rdi
	cmpq	%r9, %rdi
	jb	6b
	movq	%r9, %rdi
	jmp	sequence
7:	movq	(%rcx), %rax		# bytes that repeat: the distance doubles until eight can be copied
	movq	%rax, (%rdi)
	addq	%r8, %rdi
	addl	%r8d, %r8d
	cmpl	$8, %r8d
	jb	7b
	jmp	6b

done:
	movl	%ebp, %esi
	movl	entry(%rip), %eax
	jmp	*%rax

# Filled in when the kernel is packed: its own arguments, with a space behind each of them; where the packed kernel is
# moved to and its length in double words, where the kernel goes, and where it is entered.
	.org	_start + 512
own_arguments:
	.org	_start + 1024 - 16
target:
	.long	0
length:
	.long	0
kernel:
	.long	0
entry:
	.long	0
packed:
