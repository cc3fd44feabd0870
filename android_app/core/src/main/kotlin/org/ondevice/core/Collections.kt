package org.ondevice.core

/** A growing list of ints without boxes. */
internal class IntList {
    private var values = IntArray(16)
    var size = 0
        private set

    fun add(value: Int) {
        if (size == values.size) values = values.copyOf(size * 2)
        values[size++] = value
    }

    fun toArray(): IntArray = values.copyOf(size)
}

/** A growing list of bytes. */
internal class ByteList {
    private var values = ByteArray(64)
    var size = 0
        private set

    fun add(value: Int) {
        if (size == values.size) values = values.copyOf(size * 2)
        values[size++] = value.toByte()
    }

    /** The storage; only the first [size] bytes mean anything. */
    fun array(): ByteArray = values
}

/** From 64-bit keys to ints from 0 on, by open addressing: a fifth of the memory of a HashMap with boxes. */
internal class LongIntMap(expected: Int) {
    private val mask: Int
    private val keys: LongArray
    private val values: IntArray

    init {
        var capacity = 16
        while (capacity < expected * 2) capacity *= 2
        mask = capacity - 1
        keys = LongArray(capacity)
        values = IntArray(capacity) { ABSENT }
    }

    operator fun set(key: Long, value: Int) {
        val slot = slot(key)
        keys[slot] = key
        values[slot] = value
    }

    /** The value, or [ABSENT]. */
    operator fun get(key: Long): Int = values[slot(key)]

    private fun slot(key: Long): Int {
        val mixed = key * -0x61c8864680b583ebL
        var slot = (mixed xor (mixed ushr 32)).toInt() and mask
        while (values[slot] != ABSENT && keys[slot] != key) slot = (slot + 1) and mask
        return slot
    }

    companion object {
        const val ABSENT = -1
    }
}

/** A binary heap of longs, smallest first. */
internal class LongHeap {
    private var values = LongArray(64)
    private var size = 0

    val isEmpty: Boolean get() = size == 0

    fun push(value: Long) {
        if (size == values.size) values = values.copyOf(size * 2)
        var index = size++
        while (index > 0) {
            val parent = (index - 1) / 2
            if (values[parent] <= value) break
            values[index] = values[parent]
            index = parent
        }
        values[index] = value
    }

    fun pop(): Long {
        val top = values[0]
        val last = values[--size]
        var index = 0
        while (true) {
            var child = 2 * index + 1
            if (child >= size) break
            if (child + 1 < size && values[child + 1] < values[child]) child++
            if (values[child] >= last) break
            values[index] = values[child]
            index = child
        }
        values[index] = last
        return top
    }
}
