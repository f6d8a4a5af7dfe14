# Starts Linux from a disk by BIOS. It occupies the boot sector and the sectors behind it.
#
# Where kernel and initial RAM file system lie is in a table that is appended when the disk is made, so no file system
# has to be understood here. The disk is read in the largest pieces the BIOS allows: under software emulation each call
# costs milliseconds, whatever its size. The kernel is entered by its 16-bit protocol, which asks the BIOS for memory map
# and screen itself.
#
# Memory: 0x7c00 this program, 0x10000 the piece read last, 0x90000 the kernel's 16-bit part, 0x100000 the rest of it.

	.set	SECTORS_BEHIND, 8	# of this program and its table, as disk.rs writes them
	.set	PIECE, 127		# sectors; more is not safe with every BIOS
	.set	PIECE_SEGMENT, 0x1000
	.set	SETUP_SEGMENT, 0x9000
	.set	STACK, 0xe000		# of the kernel's 16-bit part, in its segment

	.code16
	.text
	.globl	_start
_start:
	cli
	xorw	%ax, %ax
	movw	%ax, %ss
	movw	$_start, %sp
	movw	%ax, %ds
	movw	%ax, %es
	ljmp	$0, $begin
begin:
	sti
	cld
	movb	%dl, drive
	call	read
	jmp	load

# Reads what `packet` says.
read:
	pushal
	movb	drive, %dl
	movb	$0x42, %ah
	movw	$packet, %si
	int	$0x13
	jc	failed
	popal
	ret

failed:
	movw	$message, %si
1:	lodsb
	testb	%al, %al
	jz	2f
	movb	$0x0e, %ah
	movw	$7, %bx
	int	$0x10
	jmp	1b
2:	hlt
	jmp	2b

message:
	.asciz	"The disk cannot be read.\r\n"
drive:
	.byte	0
	.balign	4
packet:				# of INT 13h, function 42h; at first it says where the rest of this program is
	.byte	16, 0
count:
	.word	SECTORS_BEHIND
buffer:
	.word	behind, 0
sector:
	.long	1, 0

	.balign	8
segments:
	.quad	0
	.quad	0x00009b000000ffff	# 8: code, 16 bits, the first 64 KiB
	.quad	0x00cf93000000ffff	# 16: data, everything
segments_end:
segments_pointer:
	.word	segments_end - segments - 1
	.long	segments

	.org	_start + 440		# here begin signature and partition table
	.space	72
behind:
load:
	inb	$0x92, %al		# line 20 of the address bus
	orb	$2, %al
	andb	$0xfe, %al
	outb	%al, $0x92
	movw	$table, %bx
	movw	$0, buffer
	movw	$PIECE_SEGMENT, buffer + 2

next:					# piece of the extent at %bx
	movl	4(%bx), %ecx
	testl	%ecx, %ecx
	jz	start
	cmpl	$PIECE, %ecx
	jbe	1f
	movl	$PIECE, %ecx
1:	movw	%cx, count
	movl	(%bx), %eax
	movl	%eax, sector
	call	read
	addl	%ecx, (%bx)
	subl	%ecx, 4(%bx)
	movl	8(%bx), %edi
	shll	$7, %ecx
	leal	(%edi, %ecx, 4), %eax
	movl	%eax, 8(%bx)
	call	copy
	cmpl	$0, 4(%bx)
	jne	next
	addw	$12, %bx
	jmp	next

# Copies %ecx double words from the piece to %edi, wherever that is.
copy:
	cli
	lgdt	segments_pointer
	movl	%cr0, %eax
	orb	$1, %al
	movl	%eax, %cr0
	ljmp	$8, $1f
1:	movw	$16, %dx
	movw	%dx, %ds
	movw	%dx, %es
	movl	$PIECE_SEGMENT << 4, %esi
	rep addr32 movsl
	andb	$0xfe, %al
	movl	%eax, %cr0
	ljmp	$0, $2f
2:	xorw	%dx, %dx
	movw	%dx, %ds
	movw	%dx, %es
	sti
	ret

# Fills in the kernel's header and enters it; see Documentation/arch/x86/boot.rst of Linux.
start:
	movw	$SETUP_SEGMENT, %ax
	movw	%ax, %es
	movb	$0xff, %es:0x210	# a loader without a number of its own
	orb	$0x80, %es:0x211	# there is a heap, which ends here:
	movw	$STACK - 0x200, %es:0x224
	movl	initrd, %eax
	movl	%eax, %es:0x218
	movl	initrd + 4, %eax
	movl	%eax, %es:0x21c
	movl	$arguments, %es:0x228
	cli
	movw	%es, %ax
	movw	%ax, %ss
	movw	$STACK, %sp
	movw	%ax, %ds
	movw	%ax, %fs
	movw	%ax, %gs
	ljmp	$SETUP_SEGMENT + 0x20, $0

# Appended when the disk is made: address and size of the initial RAM file system, the kernel's arguments, and for each
# extent its first sector, its sectors, and where it goes. One without sectors is the end.
	.org	_start + 1024
	.set	initrd, .
	.set	arguments, . + 8
	.set	table, . + 512
