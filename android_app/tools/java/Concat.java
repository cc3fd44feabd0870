import org.objectweb.asm.*;
import org.objectweb.asm.tree.*;

/** Turns string concatenation by invokedynamic into a StringBuilder. */
class Concat {
  static boolean is(InvokeDynamicInsnNode dynamic) {
    return dynamic.bsm.getOwner().equals("java/lang/invoke/StringConcatFactory");
  }

  /** Replaces one makeConcat(WithConstants) call: the operands go to locals, then to a StringBuilder in order. */
  static void replace(MethodNode method, InvokeDynamicInsnNode dynamic) {
    Type[] types = Type.getArgumentTypes(dynamic.desc);
    int[] locals = new int[types.length];
    int next = method.maxLocals;
    for (int i = 0; i < types.length; i++) {
      locals[i] = next;
      next += types[i].getSize();
    }
    method.maxLocals = next;
    InsnList list = new InsnList();
    for (int i = types.length - 1; i >= 0; i--) list.add(new VarInsnNode(types[i].getOpcode(Opcodes.ISTORE), locals[i]));
    list.add(new TypeInsnNode(Opcodes.NEW, "java/lang/StringBuilder"));
    list.add(new InsnNode(Opcodes.DUP));
    list.add(new MethodInsnNode(Opcodes.INVOKESPECIAL, "java/lang/StringBuilder", "<init>", "()V"));
    boolean plain = dynamic.name.equals("makeConcat");
    String recipe = plain ? "\u0001".repeat(types.length) : (String) dynamic.bsmArgs[0];
    StringBuilder literal = new StringBuilder();
    int argument = 0;
    int constant = 1;
    for (char c : (recipe + "\0").toCharArray()) {
      if (c == '\u0002') {
        literal.append(dynamic.bsmArgs[constant++]);
        continue;
      }
      boolean end = c == '\0' && argument == types.length;
      if (c != '\u0001' && !end) {
        literal.append(c);
        continue;
      }
      if (literal.length() > 0) {
        list.add(new LdcInsnNode(literal.toString()));
        append(list, Type.getType(String.class));
        literal.setLength(0);
      }
      if (c == '\u0001') {
        list.add(new VarInsnNode(types[argument].getOpcode(Opcodes.ILOAD), locals[argument]));
        append(list, types[argument++]);
      }
    }
    list.add(new MethodInsnNode(Opcodes.INVOKEVIRTUAL, "java/lang/StringBuilder", "toString", "()Ljava/lang/String;"));
    method.instructions.insertBefore(dynamic, list);
    method.instructions.remove(dynamic);
  }

  static void append(InsnList list, Type type) {
    String accepted = switch (type.getSort()) {
      case Type.BOOLEAN, Type.CHAR, Type.INT, Type.LONG, Type.FLOAT, Type.DOUBLE -> type.getDescriptor();
      case Type.BYTE, Type.SHORT -> "I";
      default -> type.getDescriptor().equals("Ljava/lang/String;") ? type.getDescriptor() : "Ljava/lang/Object;";
    };
    String descriptor = "(" + accepted + ")Ljava/lang/StringBuilder;";
    list.add(new MethodInsnNode(Opcodes.INVOKEVIRTUAL, "java/lang/StringBuilder", "append", descriptor));
  }
}
